"""Roots: where the outputs of one grammar begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

EXTRA_SECONDS = 0.2  # that more roots of a grammar may take to build; its first takes what it takes
OUTPUTS_EACH = 4  # that begin at a root before another is built


class Roots:
    """Copies of one llguidance matcher share a lexer behind a lock, which one thread at a time can use. So outputs
    begin at several roots, built apart from each other: as many as there are threads, if there are so many outputs.

    What one output's lexer has learned, others of its root know too: a root for each output would learn it anew.
    """

    def __init__(self, build: Callable[[], Any], most: int) -> None:
        self._build = build
        self._lock = threading.Lock()
        began = time.perf_counter()
        self._roots = [build()]
        seconds = time.perf_counter() - began
        self._most = min(most, 1 + int(EXTRA_SECONDS / max(seconds, 1e-9)))
        self._num_dealt = 0

    def __len__(self) -> int:
        return len(self._roots)

    def shrink(self) -> int:
        """Down to one, until more outputs begin; returns how many are gone."""
        with self._lock:
            num_gone, self._num_dealt = len(self._roots) - 1, 0
            del self._roots[1:]
        return num_gone

    def deal(self) -> Any:
        """A matcher at its beginning, one root after the other; never changed, only copied."""
        with self._lock:
            if len(self._roots) < self._most and self._num_dealt >= OUTPUTS_EACH * len(self._roots):
                self._roots.append(self._build())
            self._num_dealt += 1
            return self._roots[self._num_dealt % len(self._roots)]
