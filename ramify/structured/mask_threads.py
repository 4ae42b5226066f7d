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
MOST_WORKERS = 12  # processes; each holds a tokenizer of its own, some 100 MB
FEWEST_CORES = 6  # for processes to pay
FEW = 3  # states: waking threads takes longer than their masks do, as a rule

Mask = NDArray[np.uint32]  # (words,): a bit for every token, that of token 0 the lowest of the first word
WORD = 32


class MaskThreads:
    """What they are given is best in an order in which states that share a lexer stand side by side: threads wait for
    each other there."""

    def __init__(self, count: int | None = None) -> None:
        self.count = min(MOST_THREADS, num_cores()) if count is None else count

    @cached_property
    def _executor(self) -> Any:
        import llguidance

        return llguidance.LLExecutor(self.count)

    def take(self, states: Sequence[Any], token_ids: Sequence[int]) -> None:
        """Each state takes its token; one that cannot is in error from then on. No state stands here twice."""
        if self.count == 1 or len(states) < FEW:
            for state, token_id in zip(states, token_ids, strict=True):
                state.consume_token(token_id)
        else:
            self._executor.consume_token_par(list(zip(states, token_ids, strict=True)))

    def find(self, states: Sequence[Any], rows: Sequence[int], into: Mask) -> None:
        """into (R, words): the masks of these states, in these of its rows. No state stands here twice."""
        assert into.flags.c_contiguous, "rows of masks lie one after the other"
        first, size = into.ctypes.data, into.strides[0]
        if self.count == 1 or len(states) < FEW:
            for state, row in zip(states, rows, strict=True):
                state.unsafe_compute_mask_ptr(first + row * size, size)
        else:
            self._executor.unsafe_compute_mask_ptr(list(zip(states, rows, strict=True)), first, size, len(into))


def num_workers() -> int:
    """Processes that find masks: some cores are left to the engine, and to whoever asks it."""
    return min(MOST_WORKERS, num_cores() - 2) if num_cores() >= FEWEST_CORES else 0


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
