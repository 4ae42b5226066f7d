"""PrefixIndex: full blocks by the tokens in them and the block before them, so that a key covers the whole prefix.

ROOT --(t0..t15)--> entry 1 --(t16..t31)--> entry 2      A look-up compares the tokens themselves, so two different
                          \\--(u16..u31)--> entry 3      prefixes are never confused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = 0  # the parent of a first block


@dataclass(frozen=True, slots=True)
class Entry:
    """A block, and the number that the entries after it name as their parent. No number is ever reused."""

    number: int
    block: int
    key: tuple[int, tuple[int, ...]]


class PrefixIndex:
    """Finds blocks by content. Who holds and frees them is the block manager's business."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[tuple[int, tuple[int, ...]], Entry] = {}
        self._of_block: dict[int, Entry] = {}
        self._last_number = ROOT

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
        """Adds a full block and returns its number; content that is there already keeps its first block."""
        known = self._entries.get((parent, tokens))
        if known is not None:
            return known.number
        entry = Entry(self.new_number(), block, (parent, tokens))
        self._entries[entry.key] = self._of_block[block] = entry
        return entry.number

    def new_number(self) -> int:
        """A number that no look-up reaches unless an entry gets it."""
        self._last_number += 1
        return self._last_number

    def forget(self, block: int) -> None:
        """Removes a block whose content is about to change."""
        del self._entries[self._of_block.pop(block).key]

    def clear(self) -> None:
        """Removes everything; counting goes on, so that no old number is given again."""
        self._entries.clear()
        self._of_block.clear()
