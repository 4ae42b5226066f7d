"""The one owner of block tables and reference counts of one model's KV pool.

    parent  [7][2][5]          after fork(parent, child) both tables name the same blocks, each counted twice;
    child   [7][2][5]          the first of them to write into the partly filled block 5 gets a block of its own
                               and a copy to make (copy-on-write), the other keeps 5.

A block that nobody holds is free. If the prefix index knows its content, it stays findable until it is needed for
something else: plain free blocks go first, the one freed last before others, then known ones, the one freed longest ago
before others; a table is freed last block first, so that the ends of prompts go before their beginnings. Questions
(`num_free`, `table`, `find`, …) never act.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ramify.errors import CacheExhaustedError, InvalidInputError
from ramify.kv.prefix import ROOT, Entry, PrefixIndex


@dataclass(frozen=True, slots=True)
class Place:
    """Where a swapped-out track's block is: still on the device, because others hold it too, or in host memory."""

    block: int
    on_device: bool


class BlockManager:
    """Gives blocks to tracks, shares them between forks and equal prefixes, takes them back when nobody holds them."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = False, num_host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._free = list(reversed(range(num_blocks)))  # the last is taken next: its memory was touched lately
        self._free_known: OrderedDict[int, None] = OrderedDict()  # free, but the index knows their content
        self._free_host: deque[int] = deque(range(num_host_blocks))
        self._counts = [0] * num_blocks
        self._host_counts = [0] * num_host_blocks
        self._tables: dict[str, list[int]] = {}
        self._frozen: dict[str, tuple[int, ...]] = {}  # the same tables, as others see them
        self._swapped: dict[str, list[Place]] = {}
        self._index = PrefixIndex(block_size) if enable_prefix_caching else None
        self._chains: dict[str, list[int]] = {}  # numbers of a track's leading blocks in the index

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_known)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, key: str) -> tuple[int, ...]:
        """The same object as long as the table is the same."""
        return self._frozen.get(key, ())

    def open_table(self, key: str, position: int) -> tuple[int, ...] | None:
        """The table, if this position lies in a block that the track holds alone: what almost every decode finds."""
        table, index = self._frozen.get(key, ()), position // self.block_size
        return table if index < len(table) and self._counts[table[index]] == 1 else None

    def num_new_blocks(self, key: str, start: int, end: int) -> int:
        """How many blocks `extend(key, start, end)` would take."""
        table = self._tables.get(key, ())
        if self._is_open(table, start, end):
            return 0
        first, last = start // self.block_size, self.blocks_for(end)
        shared = sum(self._counts[block] > 1 for block in table[first:last])
        return shared + last - max(first, min(last, len(table)))

    def num_new_blocks_of(self, extents: Iterable[tuple[str, int, int]]) -> int:
        """How many blocks these (key, start, end) would take one after the other: the last to hold a block keeps it.

        For tracks that are swapped out: how many beside those that they are swapped into.
        """
        total = 0
        left: dict[int | Place, int] = {}  # holders of shared blocks that have not written yet
        for key, start, end in extents:
            held: Sequence[int | Place] = self._swapped[key] if key in self._swapped else self._tables.get(key, ())
            first, last = start // self.block_size, self.blocks_for(end)
            for block in held[first:last]:
                holders = left.get(block, self._num_holders(block))
                if holders > 1:
                    total += 1
                    left[block] = holders - 1
            total += last - max(first, min(last, len(held)))
        return total

    def find(self, tokens: Sequence[int]) -> list[Entry]:
        """Known blocks for the beginning of `tokens`; at least the last token is always left to compute."""
        return [] if self._index is None else self._index.find(tokens[:-1])

    def num_free_without(self, found: Sequence[Entry]) -> int:
        """How many blocks would be free once `found` is held."""
        return self.num_free - sum(self._counts[entry.block] == 0 for entry in found)

    def num_swapped(self, keys: Iterable[str]) -> int:
        """How many blocks of these tracks are in host memory."""
        places = {place for key in keys for place in self._swapped.get(key, ())}
        return sum(not place.on_device for place in places)

    def can_swap_out(self, keys: Iterable[str]) -> bool:
        return len(self._only_held_by(keys)) <= len(self._free_host)

    # -- acts ------------------------------------------------------------------------------------------------

    def extend(self, key: str, start: int, end: int) -> list[tuple[int, int]]:
        """Makes positions start..end writable for this track alone; returns (source, target) copies to make first."""
        table = self._tables.get(key, [])
        if self._is_open(table, start, end):
            return []
        if self.num_new_blocks(key, start, end) > self.num_free:
            raise CacheExhaustedError(f"{key}: no blocks left for positions {start}..{end}")
        if start > len(table) * self.block_size:
            raise InvalidInputError(f"{key}: positions before {start} have no blocks yet")
        self._tables[key] = table
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
        self._frozen[key] = tuple(table)
        return copies

    def adopt(self, key: str, found: Sequence[Entry]) -> int:
        """Gives a track that holds nothing the blocks that were found; returns how many positions they cover."""
        if self._tables.get(key):
            raise InvalidInputError(f"{key} holds blocks already")
        for entry in found:
            if self._counts[entry.block] == 0:
                del self._free_known[entry.block]
            self._counts[entry.block] += 1
        self._tables[key] = [entry.block for entry in found]
        self._frozen[key] = tuple(self._tables[key])
        self._chains[key] = [entry.number for entry in found]
        return len(found) * self.block_size

    def publish(self, key: str, num_computed: int, tokens_between: Callable[[int, int], Sequence[int]]) -> None:
        """Makes a track's full computed blocks known to the index."""
        if self._index is None:
            return
        chain, table = self._chains.setdefault(key, []), self._tables[key]
        for index in range(len(chain), num_computed // self.block_size):
            tokens = tuple(tokens_between(index * self.block_size, (index + 1) * self.block_size))
            chain.append(self._index.add(chain[-1] if chain else ROOT, tokens, table[index]))

    def fork(self, parent: str, child: str, num_blocks: int | None = None) -> None:
        """The child holds every block of the parent too, or the first `num_blocks` of them."""
        if self._tables.get(child):
            raise InvalidInputError(f"{child} holds blocks already")
        self._tables[child] = table = self._tables.get(parent, [])[:num_blocks]
        self._frozen[child] = self.table(parent)[:num_blocks]
        self._chains[child] = self._chains.get(parent, [])[:num_blocks]
        for block in table:
            self._counts[block] += 1

    def release(self, key: str) -> None:
        """Gives back what this track holds, wherever it is; holding nothing is fine."""
        self._drop(reversed(self._tables.pop(key, [])))
        self._chains.pop(key, None)
        self._frozen.pop(key, None)
        for place in reversed(self._swapped.pop(key, [])):
            if place.on_device:
                self._drop([place.block])
            else:
                self._drop_host(place.block)

    def swap_out(self, keys: Sequence[str]) -> list[tuple[int, int]]:
        """Moves the blocks that only these tracks hold to host memory; returns (device, host) copies to make."""
        moving = self._only_held_by(keys)
        if len(moving) > len(self._free_host):
            raise CacheExhaustedError(f"{', '.join(keys)}: no room in swap space")
        hosts = {block: self._free_host.popleft() for block in moving}
        for key in keys:
            table = self._tables.pop(key, [])
            self._frozen.pop(key, None)
            self._swapped[key] = [
                Place(hosts[block], on_device=False) if block in hosts else Place(block, on_device=True)
                for block in table
            ]
            moved = [block for block in table if block in hosts]
            for block in moved:
                self._host_counts[hosts[block]] += 1
            self._drop(reversed(moved))
        return list(hosts.items())

    def swap_in(self, keys: Sequence[str]) -> list[tuple[int, int]]:
        """Brings tracks back to the device; returns (host, device) copies to make."""
        if self.num_swapped(keys) > self.num_free:
            raise CacheExhaustedError(f"{', '.join(keys)}: no blocks left to swap into")
        brought: dict[int, int] = {}
        for key in keys:
            table = []
            for place in self._swapped.pop(key):
                if place.on_device:
                    table.append(place.block)
                    continue
                if place.block in brought:
                    self._counts[brought[place.block]] += 1
                else:
                    brought[place.block] = self._take()
                table.append(brought[place.block])
                self._drop_host(place.block)
            self._tables[key] = table
            self._frozen[key] = tuple(table)
        return list(brought.items())

    def reset_prefix_cache(self) -> None:
        """Forgets all content; what is held stays held."""
        if self._index is None:
            return
        self._index.clear()
        self._free.extend(self._free_known)
        self._free_known.clear()
        # What is held now was made under the old content: its chains go on under numbers that nobody can find.
        self._chains = {key: [self._index.new_number()] * len(chain) for key, chain in self._chains.items()}

    def _is_open(self, table: Sequence[int], start: int, end: int) -> bool:
        """Whether these positions lie in one block that the track holds alone: what almost every decode finds."""
        index = start // self.block_size
        return (end - 1) // self.block_size == index < len(table) and self._counts[table[index]] == 1

    def _num_holders(self, block: int | Place) -> int:
        if isinstance(block, int):
            return self._counts[block]
        return self._counts[block.block] if block.on_device else self._host_counts[block.block]

    def _only_held_by(self, keys: Iterable[str]) -> list[int]:
        """Blocks that no other track holds, in the order of the tables."""
        held = Counter(block for key in keys for block in self._tables.get(key, ()))
        return [block for block, times in held.items() if times == self._counts[block]]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._free_known.popitem(last=False)
            assert self._index is not None, "only the index makes blocks known"
            self._index.forget(block)
        self._counts[block] = 1
        return block

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._counts[block] -= 1
            if self._counts[block] == 0:
                if self._index is not None and block in self._index:
                    self._free_known[block] = None
                else:
                    self._free.append(block)

    def _drop_host(self, block: int) -> None:
        self._host_counts[block] -= 1
        if self._host_counts[block] == 0:
            self._free_host.append(block)

    # -- invariants ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless every block is either free or held exactly as often as it is counted."""
        assert self._frozen == {key: tuple(table) for key, table in self._tables.items()}, "others see a stale table"
        held = [0] * self.num_blocks
        hosted = [0] * self.num_host_blocks
        for table in self._tables.values():
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                held[block] += 1
        for places in self._swapped.values():
            for place in places:
                if place.on_device:
                    held[place.block] += 1
                else:
                    hosted[place.block] += 1
        assert held == self._counts, "counts differ from what tables hold"
        free = [*self._free, *self._free_known]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {block for block, count in enumerate(held) if count == 0}, "a block leaked"
        assert hosted == self._host_counts, "host counts differ from what is swapped out"
        unused = [block for block, count in enumerate(hosted) if count == 0]
        assert sorted(self._free_host) == unused, "a host block leaked or is used twice"
        if self._index is not None:
            assert all(block in self._index for block in self._free_known), "a free block lost its content"
            assert not any(block in self._index for block in self._free), "known content stands in a plain free block"
