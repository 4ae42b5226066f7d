"""Masks of many outputs in this process: one after the other while they are quick, and by several threads if not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_THREADS = 16
AT_ONCE = 8  # masks between two looks at the clock
PATIENCE = 0.001  # seconds; waking threads takes as long as many masks, so whatever is over sooner wakes none
MOST_WORKERS = 12  # processes; each holds a tokenizer of its own, some 100 MB
FEWEST_CORES = 6  # for processes to pay

Mask = NDArray[np.uint32]  # (words,): a bit for every token, that of token 0 the lowest of the first word
WORD = 32


class MaskThreads:
    """The threads are llguidance's own. What they are given is best in an order in which states that share a lexer
    stand side by side: threads wait for each other there."""

    def __init__(self, count: int | None = None) -> None:
        self.count = min(MOST_THREADS, num_cores()) if count is None else count

    @cached_property
    def _executor(self) -> Any:
        import llguidance

        return llguidance.LLExecutor(self.count)

    def find(self, states: Sequence[Any], rows: Sequence[int], into: Mask) -> None:
        """into (R, words): the masks of these states, in these of its rows. No state stands here twice."""
        assert into.flags.c_contiguous, "rows of masks lie one after the other"
        first, size, count = into.ctypes.data, into.strides[0], len(states)
        began = time.perf_counter()
        for start in range(0, count, AT_ONCE):
            for place in range(start, min(start + AT_ONCE, count)):
                states[place].unsafe_compute_mask_ptr(first + rows[place] * size, size)
            left = start + AT_ONCE
            if self.count > 1 and left + 1 < count and time.perf_counter() - began > PATIENCE:
                pairs = list(zip(states[left:], rows[left:], strict=True))
                self._executor.unsafe_compute_mask_ptr(pairs, first, size, len(into))
                return


def num_workers() -> int:
    """Processes that find masks: some cores are left to the engine, and to whoever asks it."""
    return min(MOST_WORKERS, num_cores() - 2) if num_cores() >= FEWEST_CORES else 0


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
