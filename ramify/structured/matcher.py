"""Matcher: where one output stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ramify.structured.limited_strings import LimitedStrings, Near, write_near
from ramify.structured.mask_threads import WORD, Mask, MaskThreads


class GrammarFaultError(Exception):
    """An output cannot go on: the grammar took more than a step may."""


class Beginning(NamedTuple):
    """What outputs of one grammar and one set of ends have in common."""

    deal: Callable[[], Any]  # a root of the grammar: llguidance's matcher, which is copied
    num_tokens: int  # to llguidance there is one more, the last, which is the end of a text
    end_token_ids: frozenset[int]  # may be drawn wherever the text may end
    ends: Mask  # the same
    threads: MaskThreads
    begun: tuple[int, ...] = ()  # what stands before the output
    strings: Callable[[], LimitedStrings] | None = None  # where the grammar limits the lengths of free strings


class Matcher:
    """Follows the tokens of one output. Forks go on by themselves; what they share is never changed."""

    __slots__ = ("_beginning", "_num_taken", "_strings", "_untold", "is_over", "root", "state")

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self.root = beginning.deal()
        self.state = self.root.deep_copy()
        self._strings = None if beginning.strings is None else beginning.strings()
        if beginning.begun:
            self.state.consume_tokens(list(beginning.begun))
            self._note(beginning.begun)
        self._num_taken = 0
        self._untold: list[int] = []  # taken, and the state does not know yet
        self.is_over = False  # an end was taken: nothing follows

    def fork(self) -> Matcher:
        """Before the first token it begins by itself: samples of one prompt stand at different roots."""
        if not self._num_taken and not self.state.is_error():
            return Matcher(self._beginning)
        copy = object.__new__(Matcher)
        copy._beginning, copy.root, copy.state = self._beginning, self.root, self.state.deep_copy()
        copy._num_taken, copy._untold, copy.is_over = self._num_taken, list(self._untold), self.is_over
        copy._strings = None if self._strings is None else self._strings.fork()
        return copy

    def take(self, token_id: int) -> None:
        """The token after those that it knows, which its output is about to get."""
        self._num_taken += 1
        if token_id in self._beginning.end_token_ids:
            self.is_over = True
        else:
            self._untold.append(token_id)
            self._note((token_id,))

    def _note(self, token_ids: Iterable[int]) -> None:
        if self._strings is not None:
            for token_id in token_ids:
                self._strings.take(token_id)

    def allowed_after(self, output: Sequence[int], num_presumed: int = 0) -> Mask | None:
        """What may follow an output, whose last tokens may be only presumed.

        None if the grammar does not go that way: then what was presumed will not be drawn.
        """
        self._catch_up(output, len(output) - num_presumed)
        mask = np.empty((1, len(self._beginning.ends)), np.uint32)
        if not num_presumed:
            return self._checked(mask, _find([self], [0], mask))
        self._tell()
        presumed = list(output[len(output) - num_presumed :])
        taken = self.state.try_consume_tokens(presumed)
        try:
            if taken < num_presumed:
                return None
            self._beginning.threads.find([self.state], [0], mask)
            return self._checked(mask, _end([self], [0], mask))
        finally:
            self.state.rollback(taken)

    def _catch_up(self, output: Sequence[int], end: int) -> None:
        for token_id in output[self._num_taken : end]:
            self.take(token_id)

    def _tell(self) -> None:
        if self._untold:
            self.state.consume_tokens(self._untold)
            self._untold = []

    def _checked(self, mask: Mask, faults: dict[int, str]) -> Mask:
        if faults:
            raise GrammarFaultError(faults[0])
        [row] = mask
        return cast(Mask, row)


class Asked(NamedTuple):
    """A row of a step, and what it has so far; or less, if its matcher was told of more."""

    matcher: Matcher
    output: Sequence[int]


def num_words(asked: Iterable[Asked]) -> int:
    """Of each one's mask."""
    return max(len(each.matcher._beginning.ends) for each in asked)


def write_masks(asked: Sequence[Asked], into: Mask) -> dict[int, str]:
    """into (R, words): what may follow each of the asked, row by row. Returns what is wrong with which.

    A grammar that cannot be followed any further allows nothing.
    """
    first: dict[int, int] = {}  # row of each matcher: siblings that share all they have share it too
    for row, (matcher, output) in enumerate(asked):
        matcher._catch_up(output, len(output))
        first.setdefault(id(matcher), row)
    rows = sorted(first.values(), key=lambda row: id(asked[row].matcher.root))
    faults = _find([asked[row].matcher for row in rows], rows, into)
    for row, (matcher, _) in enumerate(asked):
        source = first[id(matcher)]
        if source != row:
            into[row] = into[source]
            if source in faults:
                faults[row] = faults[source]
    return faults


def _find(matchers: Sequence[Matcher], rows: Sequence[int], into: Mask) -> dict[int, str]:
    """The masks of different matchers that know their outputs; those of one root side by side."""
    threads = matchers[0]._beginning.threads
    told_one = [matcher for matcher in matchers if len(matcher._untold) == 1]
    threads.take([matcher.state for matcher in told_one], [matcher._untold.pop() for matcher in told_one])
    near: list[Near] = []
    others: list[tuple[Any, int]] = []
    for matcher, row in zip(matchers, rows, strict=True):
        matcher._tell()
        if matcher.is_over:
            into[row] = matcher._beginning.ends  # nobody draws there, and nothing is wrong with it
        elif matcher._strings is not None and matcher._strings.are_near:
            near.append(Near(matcher._strings, matcher.state, row))
        else:
            others.append((matcher.state, row))
    others += [(state, row) for _, state, row in write_near(near, threads, into)]
    threads.find([state for state, _ in others], [row for _, row in others], into)
    going = [(matcher, row) for matcher, row in zip(matchers, rows, strict=True) if not matcher.is_over]
    return _end([matcher for matcher, _ in going], [row for _, row in going], into)


def _end(matchers: Sequence[Matcher], rows: Sequence[int], into: Mask) -> dict[int, str]:
    """The end, as llguidance sees it, becomes the ends of each matcher's own; what is wrong with which row."""
    if not matchers:
        return {}
    num_tokens, faults = matchers[0]._beginning.num_tokens, {}
    word, bit = num_tokens // WORD, np.uint32(1 << (num_tokens % WORD))
    may_end = (into[:, word] & bit != 0).tolist()
    into[:, word] &= ~bit
    for matcher, row in zip(matchers, rows, strict=True):
        if may_end[row]:
            if matcher.state.is_error():  # llguidance allows the end then
                faults[row] = _said(matcher.state)
                into[row] = 0
            else:
                into[row] |= matcher._beginning.ends
    return faults


def _said(state: Any) -> str:
    said = str(state.get_error()).replace("<non-verbose/>", "").split("\n", 1)[0]
    return f"the grammar of structured_outputs cannot be followed any further: {said[:200]}"


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
