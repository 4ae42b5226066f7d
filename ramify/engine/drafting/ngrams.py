"""Ngrams: where in texts that grow the last tokens of another have been written before, and what followed there.

    text     a b c d e f … a b c            "a b c" was met at 2: what follows there is "d e f"
                 ^             ^

Every run of three tokens is kept by where it ends, the latest first and each with the one before it, as in the hash
chains of LZ77. A look-up follows the chain a few places back and takes the place where most tokens agree. Adding a
token and looking one up take constant time, and memory is bounded: an index that has grown too large forgets all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SIZE = 3  # tokens that must agree at least
MOST_PLACES = 16  # that a look-up compares
LONGEST = 32  # tokens that are compared at a place
MOST_ENTRIES = 1 << 16  # some 16 MB
NOWHERE = -1

Gram = tuple[int, int, int]


class Match(NamedTuple):
    """The last `length` tokens were written before, in a text; `end` is where they end there."""

    text: Sequence[int]
    end: int
    length: int

    def following(self, most: int) -> list[int]:
        """What followed. A text that repeats itself up to its end goes on repeating."""
        known = list(self.text[self.end : self.end + most])
        period = len(self.text) - self.end
        while 0 < len(known) < most:
            known.append(known[len(known) - period])
        return known


class Ngrams:
    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._last: dict[Gram, int] = {}  # by its tokens: the latest entry
        self._before: list[int] = []  # of each entry, the one before it of the same tokens
        self._texts: list[Sequence[int]] = []  # and where it ends: after which token of which text
        self._ends: list[int] = []

    def add(self, text: Sequence[int], start: int) -> None:
        """All that ends in a text from `start` on; the text may grow, and its tokens stay."""
        if len(self._ends) + len(text) - start > MOST_ENTRIES:
            self._forget()
            start = max(start, len(text) - MOST_ENTRIES // 2)
        last = self._last
        for end in range(max(start, SIZE), len(text) + 1):
            gram = (text[end - 3], text[end - 2], text[end - 1])
            self._before.append(last.get(gram, NOWHERE))
            last[gram] = len(self._ends)
            self._texts.append(text)
            self._ends.append(end)

    def find(self, text: Sequence[int]) -> Match | None:
        """Where the end of a text was written before, as much of it as possible; the latest such place."""
        if len(text) < SIZE:
            return None
        entry = self._last.get((text[-3], text[-2], text[-1]), NOWHERE)
        best: Match | None = None
        for _ in range(MOST_PLACES):
            if entry == NOWHERE:
                break
            there, end = self._texts[entry], self._ends[entry]
            entry = self._before[entry]
            if end >= len(there):
                continue  # nothing has followed yet
            length = _agreement(text, there, end)
            if best is None or length > best.length:
                best = Match(there, end, length)
                if length == LONGEST:
                    break
        return best


def _agreement(text: Sequence[int], there: Sequence[int], end: int) -> int:
    """How many tokens before `end` are those at the end of a text; some are known to be."""
    longest = min(LONGEST, len(text), end)
    length = SIZE
    while length < longest and text[-1 - length] == there[end - 1 - length]:
        length += 1
    return length
