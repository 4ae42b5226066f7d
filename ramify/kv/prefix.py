"""Which full block holds which tokens after which others: a chain, so that a block's key covers all that precedes it.

ROOT --(t0..t15)--> entry 1 --(t16..t31)--> entry 2      a look-up compares the tokens themselves: no two
                          \\--(u16..u31)--> entry 3      different prefixes can ever meet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = 0  # the parent of a first block


@dataclass(frozen=True, slots=True)
class Entry:
    """A block and the number under which longer prefixes continue from it. Numbers are never used twice."""

    number: int
    block: int
    key: tuple[int, tuple[int, ...]]


class PrefixIndex:
    """Knows blocks by content. Who holds or frees them is the block manager's business."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[tuple[int, tuple[int, ...]], Entry] = {}
        self._of_block: dict[int, Entry] = {}
        self._numbers_given = ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._of_block

    def find(self, tokens: Sequence[int]) -> list[Entry]:
        """The longest known chain of full blocks at the beginning of `tokens`."""
        found: list[Entry] = []
        parent = ROOT
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            entry = self._entries.get((parent, tuple(tokens[start : start + self._block_size])))
            if entry is None:
                break
            found.append(entry)
            parent = entry.number
        return found

    def add(self, parent: int, tokens: tuple[int, ...], block: int) -> int:
        """Makes a full block known and returns its number; content that is known already keeps its first block."""
        known = self._entries.get((parent, tokens))
        if known is not None:
            return known.number
        entry = Entry(self.new_number(), block, (parent, tokens))
        self._entries[entry.key] = self._of_block[block] = entry
        return entry.number

    def new_number(self) -> int:
        """A number that stands for no prefix: what is added under it can never be found."""
        self._numbers_given += 1
        return self._numbers_given

    def forget(self, block: int) -> None:
        """The block's content is about to change."""
        del self._entries[self._of_block.pop(block).key]

    def clear(self) -> None:
        """Forgets everything; numbers go on counting, so that none given before is ever given again."""
        self._entries.clear()
        self._of_block.clear()
