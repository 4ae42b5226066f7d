"""What the attention kernels do in one decode step: a list of items, each one stretch of keys and values.

    row 0   |== shared ==|== shared =|-- own --|-- own |      a shared prefix of two splits, then two splits of its own
    row 1   |== shared ==|== shared =|-- ow|                  the same two shared items serve this row too
    row 2   |---- own ----|---- own ----|-|                   in no group: everything is its own

Each stretch gives every row that reads it one *part*: an output vector per head and the log-sum-exp of its scores. The
parts of a row lie one after the other, shared ones first, and are merged at the end.

Where rows are cut is said by `Cuts` (stretches.py): it depends on that row, its group and the padded number of rows, or
on positions alone, so what a row computes does not depend on what the others are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ramify.device.reads import Int64s, Reads
from ramify.gpu.kernels.stretches import Cuts, Stretches

Int32s = NDArray[np.int32]

OWN_FIELDS, PREFIX_FIELDS, GROUP_FIELDS = 4, 6, 2
MOST_SHARES = 2.0  # of what a program walks on average: the most that one item may be of a row in several parts


@dataclass(frozen=True, slots=True)
class WorkList:
    """One step's items as the device reads them; positions are those of the row's track."""

    own: Int32s  # (items, 4): row, kv_start, kv_end, part; or all of a row's own parts, and ~ the first of them
    prefix: Int32s  # (items, 6): group, kv_start, kv_end, first query, number of queries, split
    groups: Int32s  # (groups, 2): the row whose block table is read, where its members begin
    members: Int32s  # rows of all groups, group by group
    first_part: Int32s  # (rows,)
    num_parts: Int32s  # (rows,)
    shared_parts: Int32s  # (rows,) how many of them

    @property
    def total_parts(self) -> int:
        return int(self.first_part[-1] + self.num_parts[-1]) if len(self.num_parts) else 0


def build_work_list(
    reads: Reads, *, queries_per_row: int, query_tile: int, cuts: Cuts, programs: int | None = None
) -> WorkList:
    """The single rows of a step; rows that no chunk stands in are padding.

    `queries_per_row` query heads read one KV head; the queries of sharers, row by row, are cut into tiles of
    `query_tile`. Query q of a shared prefix belongs to its sharer q // queries_per_row.

    programs: how many items are walked at a time, if one may be all that a row reads by itself, whatever its parts.
    """
    starts, ends = np.zeros((2, reads.num_singles), np.int64)  # of each row's own part
    single = slice(None) if reads.num_singles == reads.size else reads.num_rows == 1
    rows = reads.first_rows[single]
    starts[rows], ends[rows] = reads.begins[single], reads.ends[single]
    if (starts > ends).any():
        raise ValueError(f"row {int(np.argmax(starts > ends))} is shorter than the prefix it shares")
    shared_parts = np.zeros_like(ends)
    groups = np.empty((len(reads.shared), GROUP_FIELDS), np.int32)
    prefix, members = np.empty((0, PREFIX_FIELDS), np.int32), np.empty(0, np.int64)
    if reads.shared:
        sizes = np.array([len(prefix.sharers) for prefix in reads.shared])
        prefixes = np.array([prefix.num_blocks for prefix in reads.shared]) * reads.block_size
        sharers = chain.from_iterable(prefix.sharers for prefix in reads.shared)
        members = reads.first_rows[np.fromiter(sharers, np.int64, int(sizes.sum()))]
        stretches = cuts.shared(prefixes, sizes)
        shared_parts[members] = np.repeat(stretches.counts, sizes)
        groups[:, 1] = np.cumsum(sizes) - sizes
        groups[:, 0] = members[groups[:, 1]]
        prefix = _prefix_items(stretches, sizes * queries_per_row, query_tile)
    own = cuts.own(starts, ends)
    num_parts = own.counts + shared_parts
    first_part = np.cumsum(num_parts) - num_parts
    return WorkList(
        own=_own_items(own, first_part + shared_parts, whole_rows(own.counts, ends - starts, programs)),
        prefix=prefix,
        groups=groups,
        members=members.astype(np.int32),
        first_part=first_part.astype(np.int32),
        num_parts=num_parts.astype(np.int32),
        shared_parts=shared_parts.astype(np.int32),
    )


def whole_rows(num_parts: Int64s, lengths: Int64s, programs: int | None) -> NDArray[np.bool_]:
    """(rows,) whose own parts are one item: where that keeps no program for long when all others are done."""
    if programs is None:
        return np.zeros(len(lengths), bool)
    is_whole: NDArray[np.bool_] = (num_parts == 1) | (lengths <= MOST_SHARES * lengths.sum() / programs)
    return is_whole


def _own_items(own: Stretches, first_own_part: Int64s, is_whole: NDArray[np.bool_]) -> Int32s:
    """The longest first: what programs take last, one more or one less of them, is then short."""
    items = np.empty((len(own.owners), OWN_FIELDS), np.int32)
    items[:, 0] = own.owners
    items[:, 1] = own.starts
    items[:, 2] = own.ends
    items[:, 3] = first_own_part[own.owners] + own.indices
    if is_whole.any():
        joined = is_whole[own.owners]
        is_first, is_last = own.indices == 0, own.indices == own.counts[own.owners] - 1
        items[joined & is_first, 2] = own.ends[joined & is_last]
        items[joined, 3] = ~items[joined, 3]
        items = items[~joined | is_first]
    return items[np.argsort(items[:, 1] - items[:, 2], kind="stable")]


def _prefix_items(shared: Stretches, queries: Int64s, tile: int) -> Int32s:
    # Tiles of one stretch follow each other: programs that run at the same time find its keys in the cache.
    tiles = -(-queries // tile)[shared.owners]
    stretch = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(stretch)) - (np.cumsum(tiles) - tiles)[stretch]) * tile
    group = shared.owners[stretch]
    items = np.empty((len(stretch), PREFIX_FIELDS), np.int32)
    items[:, 0] = group
    items[:, 1] = shared.starts[stretch]
    items[:, 2] = shared.ends[stretch]
    items[:, 3] = first
    items[:, 4] = np.minimum(queries[group] - first, tile)
    items[:, 5] = shared.indices[stretch]
    return items
