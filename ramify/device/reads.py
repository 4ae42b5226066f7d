"""Which rows of a step read which positions: the one description of attention that every device executes.

    chunk 0   |===== shared =====|--- own ---|      two chunks hold the same leading blocks: these are read once for
    chunk 1   |===== shared =====|-- own -|         both, as one dense product, and each chunk's own part apart;
    chunk 2   |------ own ------|                   the parts of a row are merged by log-sum-exp

A chunk is one row (a decode) or several (a piece of a prompt, whose rows see each other causally).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ramify.engine.plan import SharedPrefix
from ramify.engine.sharing import Table

if TYPE_CHECKING:
    from torch import Tensor

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharingRule:
    """When a device reads a shared prefix as a part of its own: a second part and a merge have their price."""

    fewest_positions: int  # that are not read again thanks to it
    prompts: bool = True  # whether pieces of prompts may share too, or single rows only
    # The most leading blocks, up to so many of this size, that may be a part of their own; None: any number.
    most_blocks: Callable[[int, int], int] | None = None

    def worthwhile(self, shared: Sequence[SharedPrefix], num_rows: Int64s, block_size: int) -> list[SharedPrefix]:
        chosen = []
        leaves_some = not self.prompts and bool((num_rows > 1).any())
        for prefix in shared:
            sharers, num_blocks = prefix.sharers, prefix.num_blocks
            if leaves_some:
                sharers = tuple(sharer for sharer in sharers if num_rows[sharer] == 1)
            if self.most_blocks is not None:
                num_blocks = self.most_blocks(num_blocks, block_size)
            if len(sharers) > 1 and (len(sharers) - 1) * num_blocks * block_size >= self.fewest_positions:
                is_whole = sharers is prefix.sharers and num_blocks == prefix.num_blocks
                chosen.append(prefix if is_whole else SharedPrefix(num_blocks, sharers))
        return chosen


@dataclass(frozen=True, slots=True)
class Followed:
    """F single rows, beams whose choice only the device knows: each goes on from another row of the step before, with
    its blocks, and writes into a block of its own. Their tables, as the host has them, are not true any more."""

    rows: Int64s  # (F,)
    sources: Int64s  # (F,) where, among the parents, the row is noted that each goes on from
    blocks: Int64s  # (F,) its own, of the position that it computes
    indices: Int64s  # (F,) which of its blocks that is
    is_inside: Int64s  # (F,) 1: the block also holds positions before that one
    parents: Tensor  # (max_rows,) int64, on the device: rows of the step before


@dataclass(frozen=True, slots=True)
class Reads:
    """Of C chunks. Row i of chunk c sees its shared part, then the positions begins[c] … ends[c] + i - 1."""

    first_rows: Int64s  # (C,) where each chunk's rows begin
    num_rows: Int64s  # (C,)
    begins: Int64s  # (C,) where its own part begins: behind what it shares
    ends: Int64s  # (C,) what its first row sees, itself included; each row after it sees one more
    tables: Sequence[Table]  # (C) the blocks of all its positions
    shared: Sequence[SharedPrefix]  # what is read together
    block_size: int
    size: int  # rows of the step, with those that are padding
    num_singles: int  # single rows, with padding among them; they stand before the rows of prompts
    followed: Followed | None = None

    @classmethod
    def of(
        cls,
        first_rows: Int64s,
        num_rows: Int64s,
        ends: Int64s,
        tables: Sequence[Table],
        shared: Sequence[SharedPrefix],
        *,
        block_size: int,
        size: int,
        num_behind: int = 0,
        followed: Followed | None = None,
    ) -> Reads:
        """`num_behind` rows at the end, behind those of prompts, are padding too."""
        begins = np.zeros_like(ends)
        for prefix in shared:
            begins[list(prefix.sharers)] = prefix.num_blocks * block_size
        num_singles = size - num_behind - int(num_rows[num_rows > 1].sum())
        return cls(first_rows, num_rows, begins, ends, tables, shared, block_size, size, num_singles, followed)

    def of_rows(self, rows: Sequence[int]) -> Reads:
        """Each of these rows as a chunk of its own, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        order = np.argsort(self.first_rows, kind="stable")
        owners = order[np.searchsorted(self.first_rows[order], chosen, side="right") - 1]
        shared = []
        for prefix in self.shared:
            sharers = np.flatnonzero(np.isin(owners, prefix.sharers)).tolist()
            if len(sharers) > 1:
                shared.append(SharedPrefix(prefix.num_blocks, tuple(sharers)))
        return Reads.of(
            chosen,
            np.ones_like(chosen),
            self.ends[owners] + chosen - self.first_rows[owners],
            [self.tables[owner] for owner in owners.tolist()],
            shared,
            block_size=self.block_size,
            size=self.size,
        )


def slots_between(table: Table, start: int, end: int, block_size: int) -> Int64s:
    """Where positions start … end - 1 lie in a pool, for the blocks of all positions from 0."""
    first = start // block_size
    blocks = np.asarray(table[first : -(-end // block_size)], dtype=np.int64)
    positions = np.arange(start - first * block_size, end - first * block_size)
    slots: Int64s = blocks[positions // block_size] * block_size + positions % block_size
    return slots
