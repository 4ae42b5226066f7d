"""The one owner of block tables and reference counts of one model's KV pool.

    parent  [7][2][5]          after fork(parent, child) both tables name the same blocks, each counted twice;
    child   [7][2][5]          the first of them to write into the partly filled block 5 gets a block of its own
                               and a copy to make (copy-on-write), the other keeps 5.

Questions (`num_free`, `table`, `num_new_blocks`) never act.
"""

from __future__ import annotations

from collections import deque

from ramify.errors import CacheExhaustedError, InvalidInputError


class BlockManager:
    """Gives blocks to tracks, shares them between forks, takes them back when nobody holds them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._counts = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, key: str) -> tuple[int, ...]:
        return tuple(self._tables.get(key, ()))

    def num_new_blocks(self, key: str, start: int, end: int) -> int:
        """How many blocks `extend(key, start, end)` would take."""
        table = self._tables.get(key, [])
        touched = range(start // self.block_size, self.blocks_for(end))
        return sum(index >= len(table) or self._counts[table[index]] > 1 for index in touched)

    # -- acts ------------------------------------------------------------------------------------------------

    def extend(self, key: str, start: int, end: int) -> list[tuple[int, int]]:
        """Makes positions start..end writable for this track alone; returns (source, target) copies to make first."""
        if self.num_new_blocks(key, start, end) > self.num_free:
            raise CacheExhaustedError(f"{key}: no blocks left for positions {start}..{end}")
        table = self._tables.setdefault(key, [])
        if start > len(table) * self.block_size:
            raise InvalidInputError(f"{key}: positions before {start} have no blocks yet")
        copies = []
        for index in range(start // self.block_size, self.blocks_for(end)):
            if index == len(table):
                table.append(self._take())
            elif self._counts[table[index]] > 1:
                shared, own = table[index], self._take()
                self._counts[shared] -= 1
                table[index] = own
                if index * self.block_size < start:  # positions before `start` live in it: keep their content
                    copies.append((shared, own))
        return copies

    def fork(self, parent: str, child: str) -> None:
        """The child holds every block of the parent too."""
        if child in self._tables:
            raise InvalidInputError(f"{child} holds blocks already")
        self._tables[child] = table = list(self._tables.get(parent, ()))
        for block in table:
            self._counts[block] += 1

    def release(self, key: str) -> None:
        """Gives back what this track holds, last block first; holding nothing is fine."""
        for block in reversed(self._tables.pop(key, [])):
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free.append(block)

    def _take(self) -> int:
        block = self._free.popleft()
        self._counts[block] = 1
        return block

    # -- invariants ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless every block is either free or held exactly as often as it is counted."""
        held = [0] * self.num_blocks
        for table in self._tables.values():
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                held[block] += 1
        assert held == self._counts, "counts differ from what tables hold"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {block for block, count in enumerate(held) if count == 0}, "a block leaked"
