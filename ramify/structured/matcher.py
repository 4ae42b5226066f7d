"""Matcher: where one output stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.structured.limited_strings import LimitedStrings, Near, write_near
from ramify.structured.mask_threads import WORD, Mask, MaskThreads


class GrammarFaultError(Exception):
    """An output cannot go on: the grammar took more than a step may."""


class Area(NamedTuple):
    """Memory that workers write masks into."""

    number: int
    masks: Mask  # (rows, words)


class Ends(NamedTuple):
    """Tokens that may be drawn wherever a text may end."""

    token_ids: frozenset[int]
    mask: Mask  # the same

    @classmethod
    def of(cls, token_ids: Iterable[int], num_tokens: int) -> Ends:
        """To llguidance there is one token more, the last, which is the end of a text."""
        unique = frozenset(token_ids)
        return cls(unique, bits_of(unique, num_tokens + 1))


class Matcher(ABC):
    """Follows the tokens of one output. Forks go on by themselves; what they share is never changed."""

    __slots__ = ("ends", "is_over", "num_taken", "untold")

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.num_taken = 0
        self.untold: list[int] = []  # taken, and llguidance does not know yet
        self.is_over = False  # an end was taken: nothing follows

    def take(self, token_id: int) -> None:
        """The token after those that it knows, which its output is about to get."""
        self.num_taken += 1
        if token_id in self.ends.token_ids:
            self.is_over = True
        else:
            self.untold.append(token_id)

    def catch_up(self, output: Sequence[int], end: int) -> None:
        """Takes what it does not know of the first so many tokens of its output."""
        if end > self.num_taken:
            for token_id in output[self.num_taken : end]:
                self.take(token_id)

    def allowed_after(self, output: Sequence[int], num_presumed: int = 0) -> Mask | None:
        """What may follow an output, whose last tokens may be only presumed.

        None if the grammar does not go that way: then what was presumed will not be drawn.
        """
        self.catch_up(output, len(output) - num_presumed)
        return self.presume(output[len(output) - num_presumed :])

    @abstractmethod
    def fork(self) -> Matcher:
        """One that goes on from here by itself."""

    @abstractmethod
    def presume(self, token_ids: Sequence[int]) -> Mask | None:
        """What may follow all that it has taken and these, which it does not take."""

    @classmethod
    def ask_all(cls, matchers: Sequence[Any]) -> bool:
        """Begins to find what `find_all` will be asked for in a step's area; returns whether it can."""
        del matchers
        return False

    @classmethod
    @abstractmethod
    def find_all(
        cls, matchers: Sequence[Any], rows: Sequence[int], into: Mask, area: Area | None = None
    ) -> dict[int, str]:
        """into (R, words): what may follow each of these, none of which stands here twice, in these rows.

        Returns what is wrong with which row: a grammar that cannot be followed any further allows nothing.
        """


class Asked(NamedTuple):
    """A row of a step, and what it has so far; or less, if its matcher was told of more."""

    matcher: Matcher
    output: Sequence[int]


def num_words(asked: Iterable[Asked]) -> int:
    """Of each one's mask: all are over one vocabulary."""
    return len(next(iter(asked)).matcher.ends.mask)


def ask_early(matchers: Sequence[Matcher]) -> bool:
    """The next step will ask what may follow these, in the first rows: returns whether others find that meanwhile."""
    kinds = {type(matcher) for matcher in matchers}
    return len(kinds) == 1 and kinds.pop().ask_all(matchers)


def write_masks(asked: Sequence[Asked], into: Mask, area: Area | None = None) -> dict[int, str]:
    """into (R, words): what may follow each of the asked, row by row. Returns what is wrong with which.

    area: the one that `into` is the beginning of, if it is one that workers write into.
    """
    first: dict[Matcher, int] = {}  # row of each matcher: siblings that share all they have share it too
    for row, (matcher, output) in enumerate(asked):
        if len(output) > matcher.num_taken:
            matcher.catch_up(output, len(output))
        first.setdefault(matcher, row)
    rows_of: dict[type[Matcher], tuple[list[Matcher], list[int]]] = {}
    for matcher, row in first.items():
        if matcher.is_over:
            into[row] = matcher.ends.mask  # nobody draws there, and nothing is wrong with it
            continue
        matchers, rows = rows_of.setdefault(type(matcher), ([], []))
        matchers.append(matcher)
        rows.append(row)
    faults: dict[int, str] = {}
    for kind, (matchers, rows) in rows_of.items():
        faults |= kind.find_all(matchers, rows, into, area)
    if len(first) < len(asked):
        for row, (matcher, _) in enumerate(asked):
            source = first[matcher]
            if source != row:
                into[row] = into[source]
                if source in faults:
                    faults[row] = faults[source]
    return faults


class Beginning(NamedTuple):
    """What outputs of one grammar and one set of ends have in common."""

    deal: Callable[[], Any]  # a root of the grammar: llguidance's matcher, which is copied
    num_tokens: int  # of the vocabulary
    ends: Ends
    threads: MaskThreads
    begun: tuple[int, ...] = ()  # what stands before the output
    strings: Callable[[], LimitedStrings] | None = None  # where the grammar limits the lengths of free strings


class LocalMatcher(Matcher):
    """One in this process."""

    __slots__ = ("_beginning", "root", "state", "strings")

    def __init__(self, beginning: Beginning) -> None:
        super().__init__(beginning.ends)
        self._beginning = beginning
        self.root = beginning.deal()
        self.state = self.root.deep_copy()
        self.strings = None if beginning.strings is None else beginning.strings()
        if beginning.begun:
            self.state.consume_tokens(list(beginning.begun))
            if self.strings is not None:
                self.strings.take(beginning.begun)

    def fork(self) -> LocalMatcher:
        """Before the first token it begins by itself: samples of one prompt stand at different roots."""
        copy = LocalMatcher(self._beginning)
        if self.num_taken or self.state.is_error():
            copy.root, copy.state = self.root, self.state.deep_copy()
            copy.num_taken, copy.untold, copy.is_over = self.num_taken, list(self.untold), self.is_over
            copy.strings = None if self.strings is None else self.strings.fork()
        return copy

    def take(self, token_id: int) -> None:
        super().take(token_id)
        if self.strings is not None and not self.is_over:
            self.strings.take((token_id,))

    def presume(self, token_ids: Sequence[int]) -> Mask | None:
        mask = np.empty((1, len(self.ends.mask)), np.uint32)
        if self.is_over:
            return self.ends.mask
        if not token_ids:
            return _checked(mask, self.find_all([self], [0], mask))
        self.tell()
        taken = self.state.try_consume_tokens(list(token_ids))
        try:
            if taken < len(token_ids):
                return None
            self._beginning.threads.find([self.state], [0], mask)
            return _checked(mask, _end([self], [0], mask))
        finally:
            self.state.rollback(taken)

    def tell(self) -> None:
        if self.untold:
            self.state.consume_tokens(self.untold)
            self.untold = []

    @classmethod
    def find_all(
        cls, matchers: Sequence[LocalMatcher], rows: Sequence[int], into: Mask, area: Area | None = None
    ) -> dict[int, str]:
        del area
        if len(matchers) > 1:  # those of one root stand side by side
            order = sorted(range(len(rows)), key=lambda place: id(matchers[place].root))
            matchers, rows = [matchers[place] for place in order], [rows[place] for place in order]
        threads = matchers[0]._beginning.threads
        near: list[Near] = []
        others: list[tuple[Any, int]] = []
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.tell()
            if matcher.strings is not None and matcher.strings.are_near:
                near.append(Near(matcher.strings, matcher.state, row))
            else:
                others.append((matcher.state, row))
        others += [(state, row) for _, state, row in write_near(near, threads, into)]
        threads.find([state for state, _ in others], [row for _, row in others], into)
        return _end(matchers, rows, into)


def _end(matchers: Sequence[LocalMatcher], rows: Sequence[int], into: Mask) -> dict[int, str]:
    """The end, as llguidance sees it, becomes the ends of each matcher's own; what is wrong with which row."""
    num_tokens, faults = matchers[0]._beginning.num_tokens, {}
    word, bit = num_tokens // WORD, np.uint32(1 << (num_tokens % WORD))
    words = into[rows, word]
    into[rows, word] = words & ~bit
    for place in np.flatnonzero(words & bit).tolist():
        matcher, row = matchers[place], rows[place]
        if matcher.state.is_error():  # llguidance allows the end then
            faults[row] = _said(matcher.state)
            into[row] = 0
        else:
            into[row] |= matcher.ends.mask
    return faults


def _checked(mask: Mask, faults: dict[int, str]) -> Mask:
    """Of one row."""
    if faults:
        raise GrammarFaultError(faults[0])
    return mask.reshape(-1)


def _said(state: Any) -> str:
    said = str(state.get_error()).replace("<non-verbose/>", "").split("\n", 1)[0]
    return f"the grammar of structured_outputs cannot be followed any further: {said[:200]}"


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
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
