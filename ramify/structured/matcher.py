"""Matcher: where one output stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]  # (words,): a bit for every token, that of token 0 the lowest of the first word
WORD = 32


class GrammarFaultError(Exception):
    """An output cannot go on: the grammar took more than a step may."""


class Matcher:
    """Follows the tokens of one output. Forks go on by themselves; what they share is never changed.

    The ends are tokens that may be drawn wherever the grammar may end.
    """

    __slots__ = ("_allowed", "_ends", "_num_taken", "_num_tokens", "_state")

    def __init__(self, state: Any, num_tokens: int, ends: Sequence[int]) -> None:
        """state: llguidance's, to which there is one token more, the last, which is the end."""
        self._state = state
        self._num_tokens = num_tokens
        self._ends = bits_of(ends, num_tokens + 1)
        self._num_taken = 0
        self._allowed: Mask | None = None

    def fork(self) -> Matcher:
        copy = object.__new__(Matcher)
        copy._state = self._state.deep_copy()
        copy._num_tokens = self._num_tokens
        copy._ends = self._ends
        copy._num_taken = self._num_taken
        copy._allowed = self._allowed
        return copy

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Whether these may come next, one after the other; takes them if so, as what stands before the output."""
        if self._state.try_consume_tokens(list(token_ids)) < len(token_ids):
            return False
        self._allowed = None
        return True

    def allowed_after(self, output: Sequence[int], num_presumed: int = 0) -> Mask | None:
        """What may follow an output, whose last tokens may be only presumed; nobody may change the mask.

        None if the grammar does not go that way: then what was presumed will not be drawn.
        """
        num_known = len(output) - num_presumed
        if num_known > self._num_taken:
            self._state.consume_tokens(list(output[self._num_taken : num_known]))
            self._num_taken, self._allowed = num_known, None
        if not num_presumed:
            if self._allowed is None:
                self._allowed = self._mask()
            return self._allowed
        taken = self._state.try_consume_tokens(list(output[num_known:]))
        try:
            return self._mask() if taken == num_presumed else None
        finally:
            self._state.rollback(taken)

    def _mask(self) -> Mask:
        mask = np.empty_like(self._ends)
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        mask[self._num_tokens // WORD] &= ~np.uint32(1 << (self._num_tokens % WORD))
        if self._state.is_accepting():
            mask |= self._ends
        return mask

    def _check(self) -> None:
        if self._state.is_error():
            said = str(self._state.get_error()).replace("<non-verbose/>", "").split("\n", 1)[0]
            raise GrammarFaultError(f"the grammar of structured_outputs cannot be followed any further: {said[:200]}")


def bits_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    """A mask of these tokens."""
    mask = np.zeros(-(-vocab_size // WORD), np.uint32)
    for token_id in token_ids:
        if token_id < vocab_size:
            mask[token_id // WORD] |= np.uint32(1 << (token_id % WORD))
    return mask


def flags_of(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """(vocab_size,) for every token whether its bit is set; those beyond the mask have none."""
    flags = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].view(np.bool_)
    return flags if len(flags) == vocab_size else np.pad(flags, (0, vocab_size - len(flags)))
