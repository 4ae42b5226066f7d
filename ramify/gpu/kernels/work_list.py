"""What the attention kernels do in one decode step: a list of items, each one stretch of keys and values.

    row 0   |== shared ==|== shared =|-- own --|-- own |      a shared prefix of two splits, then two splits of its own
    row 1   |== shared ==|== shared =|-- ow|                  the same two shared items serve this row too
    row 2   |---- own ----|---- own ----|-|                   in no group: everything is its own

Each stretch gives every row that reads it one *part*: an output vector per head and the log-sum-exp of its scores. The
parts of a row lie one after the other, shared ones first, and are merged at the end.

Stretches are cut at fixed distances from the start of the shared part and of the own part. Where a row is cut depends
on that row, its group and the padded number of rows, so what a row computes does not depend on what the others are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ramify.device.reads import Int64s, Reads

Int32s = NDArray[np.int32]

OWN_SPLITS = (64, 512)  # positions of a row's own part that one item walks: where rows are few, where they are many
MOST_OWN_PARTS = 16  # a longer row is cut into longer stretches: who merges its parts takes one after the other
PREFIX_SPLIT = 1024  # positions of a shared part that one item walks
OWN_FIELDS, PREFIX_FIELDS, GROUP_FIELDS = 4, 6, 2


@dataclass(frozen=True, slots=True)
class WorkList:
    """One step's items as the device reads them; positions are those of the row's track."""

    own: Int32s  # (items, 4): row, kv_start, kv_end, part
    prefix: Int32s  # (items, 6): group, kv_start, kv_end, first query, number of queries, split
    groups: Int32s  # (groups, 2): the row whose block table is read, where its members begin
    members: Int32s  # rows of all groups, group by group
    first_part: Int32s  # (rows,)
    num_parts: Int32s  # (rows,)

    @property
    def total_parts(self) -> int:
        return int(self.first_part[-1] + self.num_parts[-1]) if len(self.num_parts) else 0


def build_work_list(
    reads: Reads,
    *,
    queries_per_row: int,
    query_tile: int,
    own_split: int,
    prefix_split: int = PREFIX_SPLIT,
) -> WorkList:
    """The single rows of a step; rows that no chunk stands in are padding.

    `queries_per_row` query heads read one KV head; the queries of sharers, row by row, are cut into tiles of
    `query_tile`. Query q of a shared prefix belongs to its sharer q // queries_per_row. A row is cut every `own_split`
    positions, or twice that, four times that, ..., until it has no more than MOST_OWN_PARTS parts of its own.
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
        splits = -(-prefixes // prefix_split)
        shared_parts[members] = np.repeat(splits, sizes)
        groups[:, 1] = np.cumsum(sizes) - sizes
        groups[:, 0] = members[groups[:, 1]]
        prefix = _prefix_items(prefixes, splits, sizes * queries_per_row, prefix_split, query_tile)
    own_splits = np.full_like(ends, own_split)
    while (too_many := ends - starts > MOST_OWN_PARTS * own_splits).any():
        own_splits[too_many] *= 2
    own_parts = -((starts - ends) // own_splits)
    num_parts = own_parts + shared_parts
    first_part = np.cumsum(num_parts) - num_parts
    return WorkList(
        own=_own_items(starts, ends, own_parts, first_part + shared_parts, own_splits),
        prefix=prefix,
        groups=groups,
        members=members.astype(np.int32),
        first_part=first_part.astype(np.int32),
        num_parts=num_parts.astype(np.int32),
    )


def own_split_for(rows: int, kv_heads: int) -> int:
    """So that rows of 512 positions come to about 256 items, two for each processor of an H200.

    A stretch is walked tile by tile and waits for memory at each; where rows are many enough for the chip anyway, cuts
    only cost.
    """
    shortest, longest = OWN_SPLITS
    split = shortest
    while split < min(2 * rows * kv_heads, longest):
        split *= 2
    return split


def most_parts(max_model_len: int) -> int:
    """Of one row, with any number of rows beside it."""
    return min(MOST_OWN_PARTS, -(-max_model_len // OWN_SPLITS[0])) - (-max_model_len // PREFIX_SPLIT)


def _own_items(starts: Int64s, ends: Int64s, counts: Int64s, first_own_part: Int64s, splits: Int64s) -> Int32s:
    row, index = _expand(counts)
    items = np.empty((len(row), OWN_FIELDS), np.int32)
    split = splits[row]
    start = starts[row] + index * split
    items[:, 0] = row
    items[:, 1] = start
    items[:, 2] = np.minimum(start + split, ends[row])
    items[:, 3] = first_own_part[row] + index
    return items


def _prefix_items(prefixes: Int64s, splits: Int64s, queries: Int64s, split: int, tile: int) -> Int32s:
    tiles = -(-queries // tile)
    group, index = _expand(splits * tiles)
    items = np.empty((len(group), PREFIX_FIELDS), np.int32)
    # Tiles of one stretch follow each other: programs that run at the same time find its keys in the cache.
    number, tile_index = np.divmod(index, tiles[group])
    start, first = number * split, tile_index * tile
    items[:, 0] = group
    items[:, 1] = start
    items[:, 2] = np.minimum(start + split, prefixes[group])
    items[:, 3] = first
    items[:, 4] = np.minimum(queries[group] - first, tile)
    items[:, 5] = number
    return items


def _expand(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Counts 2, 0, 3 become owners 0 0 2 2 2 and indices 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - before[owner]
