"""Threads that find the masks of many outputs at once.

They are llguidance's own: one call does a whole step's work, and no thread of Python's is waited for meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_THREADS = 16

Mask = NDArray[np.uint32]  # (words,): a bit for every token, that of token 0 the lowest of the first word
WORD = 32


class MaskThreads:
    """What they are given is best in an order in which states that share a lexer stand side by side: threads wait for
    each other there."""

    def __init__(self, count: int | None = None) -> None:
        self.count = min(MOST_THREADS, _num_cores()) if count is None else count

    @cached_property
    def _executor(self) -> Any:
        import llguidance

        return llguidance.LLExecutor(self.count)

    def take(self, states: Sequence[Any], token_ids: Sequence[int]) -> None:
        """Each state takes its token; one that cannot is in error from then on. No state stands here twice."""
        if states:
            self._executor.consume_token_par(list(zip(states, token_ids, strict=True)))

    def find(self, states: Sequence[Any], rows: Sequence[int], into: Mask) -> None:
        """into (R, words): the masks of these states, in these of its rows. No state stands here twice."""
        if states:
            assert into.flags.c_contiguous, "rows of masks lie one after the other"
            pairs = list(zip(states, rows, strict=True))
            self._executor.unsafe_compute_mask_ptr(pairs, into.ctypes.data, into.strides[0], len(into))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
