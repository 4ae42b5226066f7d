"""Which chunks of one model's step may read the same leading blocks together; looked for when somebody came.

    chunk 0   [0][1][2]|3 4 5|        computes blocks 3, 4 and 5
    chunk 1   [0][1][2][3][4][5]|6|   came in the same step, and holds them already
    chunk 2   [0][1][2][3][4][5]|7|   so does this one: 1 and 2 share three blocks now, and six in the next step

What is shared was computed before the step: devices read it while kernels before are still at work.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from ramify.engine.blocks import BlockManager
from ramify.engine.plan import Chunk, Onward, SharedPrefix
from ramify.engine.sharing import Table, best_sharing, common_blocks


class SharedReads:
    """Who leaves changes nothing: the others share what they shared. Who comes is looked at if others hold its blocks
    too, and then all are."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._looked_at: set[str] = set()  # tracks; who is not among them has come since
        self._sharing_of: dict[str, int] = {}  # tracks that share, and where
        self._num_blocks: list[int] = []  # of each sharing
        self._moving: set[str] = set()  # tracks that were looked at as beams whose next parents are not known
        # The members of the last step, if it had nobody else, and what they share.
        self._last: tuple[Sequence[object], list[SharedPrefix]] | None = None

    def forget(self) -> None:
        """Tables changed: find out again."""
        self._looked_at, self._sharing_of, self._num_blocks, self._moving = set(), {}, [], set()

    def fork(self, parent: str, child: str) -> None:
        """A track holds the blocks of another: it shares what that one shares, and with those."""
        number = self._sharing_of.get(parent)
        if number is not None:
            self._looked_at.add(child)
            self._sharing_of[child] = number

    def follow(self, parent: str, key: str) -> None:
        """The same for a track that gave up its own."""
        is_moving = key in self._moving
        self.leave(key)
        self.fork(parent, key)
        if is_moving:
            self._moving.add(key)

    def leave(self, key: str) -> None:
        """A track gave up its blocks; whoever comes by its name is another."""
        self._looked_at.discard(key)
        self._moving.discard(key)
        self._sharing_of.pop(key, None)

    def find(
        self, chunks: Sequence[Chunk], onward: Onward | None = None, moving: Sequence[range] = ()
    ) -> list[SharedPrefix]:
        """Sharers are the members of `onward` by their places, and chunks by theirs behind them.

        moving: chunks of beams each of which may by now hold the blocks of any other beside it. They share what all of
        them held when they were last looked at, and no more.
        """
        if any(chunks[index].key not in self._moving for beams in moving for index in beams):
            self.forget()
        members = () if onward is None else onward.members
        changed = () if onward is None else onward.changed
        if not chunks and not changed and self._last is not None and members is self._last[0] and self._looked_at:
            return self._last[1]
        keys = [member.key for member in members]
        keys += [chunk.key for chunk in chunks]
        coming = keys
        if self._looked_at:
            places = (*changed, *range(len(members), len(keys)))
            coming = [keys[index] for index in places if keys[index] not in self._looked_at]
        all_is_there = True
        if any(map(self._manager.is_shared, coming)):
            all_is_there = self._look(chunks, onward, moving)
            self._looked_at = set(keys)
        else:
            self._looked_at.update(coming)
        sharers: list[list[int]] = [[] for _ in self._num_blocks]
        if self._sharing_of:
            for index, key in enumerate(keys):
                number = self._sharing_of.get(key)
                if number is not None:
                    sharers[number].append(index)
        found = zip(self._num_blocks, sharers, strict=True)
        shared = [SharedPrefix(num_blocks, tuple(rows)) for num_blocks, rows in found if len(rows) > 1]
        is_on_its_way = any(len(chunk.token_ids) > 1 and self._manager.is_shared(chunk.key) for chunk in chunks)
        if is_on_its_way or not all_is_there:
            self.forget()  # more will be shared in the next step
        self._last = (members, shared) if not chunks else None
        return shared

    def _look(self, chunks: Sequence[Chunk], onward: Onward | None, moving: Sequence[range]) -> bool:
        """Returns whether all that rows hold was there before the step, but for what each computes itself."""
        size = self._manager.block_size
        written = {
            block
            for chunk in chunks
            for block in chunk.block_table[chunk.start // size : -(-(chunk.start + len(chunk.token_ids)) // size)]
        }
        rows = [(chunk.key, chunk.start, chunk.block_table) for chunk in chunks]
        for beams in moving:
            first = chunks[beams[0]].block_table
            common = first[: min(common_blocks(first, chunks[index].block_table) for index in beams)]
            for index in beams:
                rows[index] = (chunks[index].key, chunks[index].start, common)
                self._moving.add(chunks[index].key)
        if onward is not None:
            rows = [*zip(onward.keys(), onward.positions.tolist(), onward.tables, strict=True), *rows]
            written.update(onward.blocks.tolist())
        rows = [row for row in rows if self._manager.is_shared(row[0])]
        # Only blocks that were full before this step count: a chunk's own positions are not its past.
        held = [table[: start // size] for _, start, table in rows]
        tables = [_without_last(table, written) for table in held]
        found = best_sharing(tables)
        self._num_blocks = [sharing.num_blocks for sharing in found]
        self._sharing_of = {rows[row][0]: number for number, sharing in enumerate(found) for row in sharing.rows}
        return tables == held


def _without_last(table: Table, blocks: Set[int]) -> Table:
    """Without those of these blocks at the end: what comes after a block is not computed before it."""
    length = len(table)
    while length and table[length - 1] in blocks:
        length -= 1
    return table[:length]
