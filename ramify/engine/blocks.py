"""BlockManager: the one owner of the block tables and reference counts of one model's KV pool.

    parent  [7][2][5]          After fork(parent, child) both tables name the same blocks, with a reference count of 2.
    child   [7][2][5]          Whoever writes first into the partly filled block 5 gets a block of its own and a copy
                               to make (copy-on-write); the other keeps 5.

A block with reference count 0 is free. If it is cached (the prefix index knows its content), it can be found until it
is reused. Uncached blocks are reused first, newest first; then cached ones, least recently freed first. A table is
freed from its end, so that the end of a prompt is evicted before its beginning. Questions (`num_free`, `table`,
`find`, …) never change anything.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ramify.engine.prefix import ROOT, Entry, PrefixIndex
from ramify.errors import CacheExhaustedError, InvalidInputError


@dataclass(frozen=True, slots=True)
class SwappedBlock:
    """A block of a swapped-out track: still on the device, because others hold it too, or in host memory."""

    block: int
    on_device: bool


class BlockManager:
    """Gives blocks to tracks and shares them between forks and equal prefixes; what nobody holds any more is free."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = False, num_host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """All blocks are free and none is cached, whatever was before."""
        self._free = list(reversed(range(self.num_blocks)))  # a stack: the memory touched last is reused first
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._free_host: deque[int] = deque(range(self.num_host_blocks))
        self._counts = [0] * self.num_blocks
        self._host_counts = [0] * self.num_host_blocks
        self._tables: dict[str, list[int]] = {}
        self._frozen: dict[str, tuple[int, ...]] = {}  # the same tables, as others see them
        self._swapped: dict[str, list[SwappedBlock]] = {}
        self._index = PrefixIndex(self.block_size) if self.enable_prefix_caching else None
        self._chains: dict[str, list[int]] = {}  # by track: its leading blocks' numbers in the index

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_cached)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, key: str) -> tuple[int, ...]:
        """The same tuple object for as long as the table does not change."""
        return self._frozen.get(key, ())

    def open_table(self, key: str, position: int) -> tuple[int, ...] | None:
        """The table, if the track alone holds the block of this position, as in almost every decode; else None."""
        table, index = self._frozen.get(key, ()), position // self.block_size
        return table if index < len(table) and self._counts[table[index]] == 1 else None

    def is_shared(self, key: str) -> bool:
        """Whether other tracks hold its first block too; who does not share that one shares none."""
        table = self._frozen.get(key, ())
        return bool(table) and self._counts[table[0]] > 1

    def num_new_blocks(self, key: str, start: int, end: int) -> int:
        """How many blocks `extend(key, start, end)` would take."""
        table = self._tables.get(key, ())
        if self._is_open(table, start, end):
            return 0
        first, last = start // self.block_size, self.blocks_for(end)
        shared = sum(self._counts[block] > 1 for block in table[first:last])
        return shared + last - max(first, min(last, len(table)))

    def num_new_blocks_of(self, extents: Iterable[tuple[str, int, int]]) -> int:
        """How many blocks `extend` would take for these (key, start, end) in turn.

        Of the tracks that share a block, all but the last one to write take a new block. For tracks that are swapped
        out, the blocks that swapping in takes are not counted.
        """
        total = 0
        left: dict[int | SwappedBlock, int] = {}  # holders of shared blocks that have not written yet
        for key, start, end in extents:
            held: Sequence[int | SwappedBlock] = (
                self._swapped[key] if key in self._swapped else self._tables.get(key, ())
            )
            first, last = start // self.block_size, self.blocks_for(end)
            for block in held[first:last]:
                holders = left.get(block, self._num_holders(block))
                if holders > 1:
                    total += 1
                    left[block] = holders - 1
            total += last - max(first, min(last, len(held)))
        return total

    def find(self, tokens: Sequence[int]) -> list[Entry]:
        """Cached blocks for the beginning of `tokens`; at least the last token is always left to compute."""
        return [] if self._index is None else self._index.find(tokens[:-1])

    def num_free_without(self, found: Sequence[Entry]) -> int:
        """How many blocks would be free after `adopt` of `found`."""
        return self.num_free - sum(self._counts[entry.block] == 0 for entry in found)

    def num_swapped(self, keys: Iterable[str]) -> int:
        """How many blocks of these tracks are in host memory."""
        swapped = {block for key in keys for block in self._swapped.get(key, ())}
        return sum(not block.on_device for block in swapped)

    def can_swap_out(self, keys: Iterable[str]) -> bool:
        return len(self._only_held_by(keys)) <= len(self._free_host)

    # -- changes ------------------------------------------------------------------------------------------------

    def extend(self, key: str, start: int, end: int) -> list[tuple[int, int]]:
        """Gives the track blocks of its own for positions start..end; returns (source, target) copies to make first."""
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
                if index * self.block_size < start:  # it also holds positions before `start`
                    copies.append((shared, own))
        self._frozen[key] = tuple(table)
        return copies

    def append_block(self, key: str, position: int) -> tuple[int, ...] | None:
        """What `extend` comes to where a position opens the next block; the new table, or None if it was not that."""
        table = self._tables.get(key)
        if table is None or position != len(table) * self.block_size or self.num_free == 0:
            return None
        table.append(self._take())
        frozen = self._frozen[key] = (*self._frozen[key], table[-1])
        return frozen

    def copy_block(self, key: str, position: int) -> tuple[int, int] | None:
        """What `extend` comes to where a position lies inside a block that others hold too.

        Returns the (source, target) copy to make first, or None if it was not that.
        """
        table, index = self._tables.get(key, []), position // self.block_size
        is_inside = index < len(table) and position % self.block_size > 0
        if not is_inside or self._counts[table[index]] == 1 or self.num_free == 0:
            return None
        shared, own = table[index], self._take()
        self._counts[shared] -= 1
        table[index] = own
        self._frozen[key] = tuple(table)
        return shared, own

    def open_blocks(self, keys: Sequence[str], position: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
        """What `append_block` or `copy_block` come to for tracks that all stand at this position, with blocks for all
        before it; there must be as many free blocks as tracks.

        Returns their tables, each of which holds the position's block alone, and (source, target) copies to make first.
        """
        index, is_inside = position // self.block_size, position % self.block_size > 0
        tables: list[tuple[int, ...]] = []
        copies: list[tuple[int, int]] = []
        frozen, counts = self._frozen, self._counts
        for key in keys:
            table = frozen[key]
            if index == len(table):
                self._tables[key].append(self._take())
                table = frozen[key] = (*table, self._tables[key][-1])
            elif counts[table[index]] > 1:
                shared, own = table[index], self._take()
                counts[shared] -= 1
                self._tables[key][index] = own
                table = frozen[key] = tuple(self._tables[key])
                if is_inside:
                    copies.append((shared, own))
            tables.append(table)
        return tables, copies

    def adopt(self, key: str, found: Sequence[Entry]) -> int:
        """Gives the blocks that `find` found to a track without blocks; returns how many positions they cover."""
        if self._tables.get(key):
            raise InvalidInputError(f"{key} holds blocks already")
        for entry in found:
            if self._counts[entry.block] == 0:
                del self._free_cached[entry.block]
            self._counts[entry.block] += 1
        self._tables[key] = [entry.block for entry in found]
        self._frozen[key] = tuple(self._tables[key])
        self._chains[key] = [entry.number for entry in found]
        return len(found) * self.block_size

    def publish(self, key: str, num_computed: int, tokens_between: Callable[[int, int], Sequence[int]]) -> None:
        """Caches a track's full, computed blocks: from now on `find` finds them."""
        if self._index is None:
            return
        chain, table = self._chains.setdefault(key, []), self._tables[key]
        for index in range(len(chain), num_computed // self.block_size):
            tokens = tuple(tokens_between(index * self.block_size, (index + 1) * self.block_size))
            chain.append(self._index.add(chain[-1] if chain else ROOT, tokens, table[index]))

    def fork(self, parent: str, child: str, num_blocks: int | None = None) -> None:
        """The child shares all blocks of the parent, or the first `num_blocks` of them."""
        if self._tables.get(child):
            raise InvalidInputError(f"{child} holds blocks already")
        self._tables[child] = table = self._tables.get(parent, [])[:num_blocks]
        self._frozen[child] = self.table(parent)[:num_blocks]
        self._chains[child] = self._chains.get(parent, [])[:num_blocks]
        counts = self._counts
        for block in table:
            counts[block] += 1

    def follow(self, parent: str, key: str, own_from: int | None = None) -> None:
        """What `release` of a track and then `fork` of the parent by its name come to.

        own_from: it keeps its own blocks from this one on, where it has begun to write what comes after. Siblings
        differ in their last few blocks: only these are given up and shared.
        """
        table, source = self._tables.setdefault(key, []), self._tables.get(parent, [])
        kept = [] if own_from is None else table[own_from:]
        if own_from is not None:
            table, source = table[:own_from], source[:own_from]
        same = min(len(table), len(source))
        while same and table[same - 1] != source[same - 1]:
            same -= 1
        if table[:same] != source[:same]:  # the same block after different ones: computed apart
            same = 0
        counts = self._counts
        for block in source[same:]:
            counts[block] += 1
        self._drop(reversed(table[same:]))
        table[same:] = source[same:]
        self._tables[key] = table
        self._frozen[key] = self.table(parent)
        if own_from is not None:
            table += kept
            self._frozen[key] = tuple(table)
        self._chains[key] = self._chains.get(parent, []).copy()

    def release(self, key: str) -> None:
        """Frees what this track holds, on the device or swapped out; holding nothing is fine."""
        self._drop(reversed(self._tables.pop(key, [])))
        self._chains.pop(key, None)
        self._frozen.pop(key, None)
        for swapped in reversed(self._swapped.pop(key, [])):
            if swapped.on_device:
                self._drop([swapped.block])
            else:
                self._drop_host(swapped.block)

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
                SwappedBlock(hosts[block], on_device=False) if block in hosts else SwappedBlock(block, on_device=True)
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
            for swapped in self._swapped.pop(key):
                if swapped.on_device:
                    table.append(swapped.block)
                    continue
                if swapped.block in brought:
                    self._counts[brought[swapped.block]] += 1
                else:
                    brought[swapped.block] = self._take()
                table.append(brought[swapped.block])
                self._drop_host(swapped.block)
            self._tables[key] = table
            self._frozen[key] = tuple(table)
        return list(brought.items())

    def reset_prefix_cache(self) -> None:
        """Nothing that was cached so far is found again; tracks keep their blocks."""
        if self._index is None:
            return
        self._index.clear()
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        # Blocks that are held now must not be found either, nor what is appended to them: their chains continue from
        # numbers that no look-up reaches.
        self._chains = {key: [self._index.new_number()] * len(chain) for key, chain in self._chains.items()}

    def _is_open(self, table: Sequence[int], start: int, end: int) -> bool:
        """Whether these positions lie in one block that the track alone holds, as in almost every decode."""
        index = start // self.block_size
        return (end - 1) // self.block_size == index < len(table) and self._counts[table[index]] == 1

    def _num_holders(self, block: int | SwappedBlock) -> int:
        if isinstance(block, int):
            return self._counts[block]
        return self._counts[block.block] if block.on_device else self._host_counts[block.block]

    def _only_held_by(self, keys: Iterable[str]) -> list[int]:
        """Blocks that no track but these holds, in the order of their tables."""
        held = Counter(block for key in keys for block in self._tables.get(key, ()))
        return [block for block, times in held.items() if times == self._counts[block]]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._free_cached.popitem(last=False)
            assert self._index is not None, "a block was cached without an index"
            self._index.forget(block)
        self._counts[block] = 1
        return block

    def _drop(self, blocks: Iterable[int]) -> None:
        counts = self._counts
        for block in blocks:
            counts[block] -= 1
            if not counts[block]:
                if self._index is not None and block in self._index:
                    self._free_cached[block] = None
                else:
                    self._free.append(block)

    def _drop_host(self, block: int) -> None:
        self._host_counts[block] -= 1
        if self._host_counts[block] == 0:
            self._free_host.append(block)

    # -- invariants ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless reference counts are what the tables say and all other blocks are free."""
        assert self._frozen == {key: tuple(table) for key, table in self._tables.items()}, "a frozen table is stale"
        held = [0] * self.num_blocks
        held_on_host = [0] * self.num_host_blocks
        for table in self._tables.values():
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                held[block] += 1
        for blocks in self._swapped.values():
            for swapped in blocks:
                if swapped.on_device:
                    held[swapped.block] += 1
                else:
                    held_on_host[swapped.block] += 1
        assert held == self._counts, "reference counts differ from what tables hold"
        free = [*self._free, *self._free_cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {block for block, count in enumerate(held) if count == 0}, "a block leaked"
        assert held_on_host == self._host_counts, "host counts differ from what is swapped out"
        unused = [block for block, count in enumerate(held_on_host) if count == 0]
        assert sorted(self._free_host) == unused, "a host block leaked or is used twice"
        if self._index is not None:
            assert all(block in self._index for block in self._free_cached), "a cached block is not in the index"
            assert not any(block in self._index for block in self._free), "the index names an uncached free block"
