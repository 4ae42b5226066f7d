"""Shared-prefix attention: the queries of all sharers of a prefix over the blocks they share, read once per tile.

    query q of a prefix       its sharer q // QUERIES_PER_ROW, head kv_head * QUERIES_PER_ROW + q % QUERIES_PER_ROW
    tile                      BLOCK_M queries one after the other, whichever rows they belong to

               shared blocks, cut into splits
            |  split 0  |  split 1  |  split 2 |
    tile 0  |   item    |   item    |   item   |            one dense product each, per key-value head
    tile 1  |   item    |   item    |   item   |
    writes     partials[first_part[row] + split, head], lse likewise, for each query of the tile

    item       PREFIX, START, END, FIRST_QUERY, NUM_QUERIES, SPLIT
    prefix     TABLE_ROW: the row whose block table is read; FIRST_SHARER: where its rows begin among `sharers`

The number of programs is fixed and the number of items is read on the device, as in decode_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels import work_list
from ramify.gpu.kernels.attention_task import AttentionTask, Sharing
from ramify.gpu.kernels.decode_attention import FIRST_ITEM, NUM_ITEMS
from ramify.gpu.kernels.walk import (
    EXACT_BLOCK_M,
    EXACT_BLOCK_N,
    EXACT_OPTIONS,
    begin_part,
    finish,
    walk_to_the_end,
)

PREFIX_FIELDS = tl.constexpr(work_list.PREFIX_FIELDS)
PREFIX, START, END, FIRST_QUERY, NUM_QUERIES, SPLIT = map(tl.constexpr, range(work_list.PREFIX_FIELDS))
SHARING_FIELDS = tl.constexpr(work_list.GROUP_FIELDS)
TABLE_ROW, FIRST_SHARER = map(tl.constexpr, range(work_list.GROUP_FIELDS))

# By bytes of a number. float32 goes without matrix units and keeps its tiles in registers: larger ones would not fit.
BLOCK_M = {2: 64, 4: 16}  # queries of a tile: the work list is cut by it too
BLOCK_N = {2: 64, 4: 32}
NUM_WARPS = 4
NUM_STAGES = 3
PROGRAMS_PER_PROCESSOR = 2


@triton.jit
def _prefix(  # type: ignore[no-untyped-def]
    queries,
    kv,
    tables,
    count,
    items,
    prefixes,
    sharers,
    first_part,
    partials,
    lse,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    QUERIES_PER_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    num_items = tl.load(count + NUM_ITEMS)
    first_item = items + tl.load(count + FIRST_ITEM)
    dim = tl.arange(0, HEAD_DIM)
    index = tl.arange(0, BLOCK_M)
    for work in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * PREFIX_FIELDS
        prefix = prefixes + tl.load(item + PREFIX) * SHARING_FIELDS
        start = tl.load(item + START)
        end = tl.load(item + END)
        query = tl.load(item + FIRST_QUERY) + index
        real = index < tl.load(item + NUM_QUERIES)
        split = tl.load(item + SPLIT)
        table = tables + tl.load(prefix + TABLE_ROW).to(tl.int64) * table_stride
        kv_head = work % KV_HEADS
        first_sharer = sharers + tl.load(prefix + FIRST_SHARER)
        row = tl.load(first_sharer + query // QUERIES_PER_ROW, mask=real, other=0).to(tl.int64)
        head = kv_head * QUERIES_PER_ROW + query % QUERIES_PER_ROW
        tile = tl.load(
            queries + row[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
            mask=real[:, None],
            other=0.0,
        )
        output, total, peak = begin_part(BLOCK_M, HEAD_DIM, EXACT)
        output, total, peak = walk_to_the_end(
            output,
            total,
            peak,
            tile,
            kv,
            table,
            kv_head,
            start,
            end - (end - start) % BLOCK_N,
            end,
            scale,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            EXACT=EXACT,
        )
        output, score = finish(output, total, peak, EXACT)
        part = tl.load(first_part + row, mask=real, other=0).to(tl.int64) + split
        target = part * (KV_HEADS * QUERIES_PER_ROW) + head
        tl.store(partials + target[:, None] * HEAD_DIM + dim[None, :], output, mask=real[:, None])
        tl.store(lse + target, score, mask=real)


def tile_of(itemsize: int, *, exact: bool) -> tuple[int, int]:
    """How many queries and positions a tile has."""
    queries, positions = (EXACT_BLOCK_M, EXACT_BLOCK_N) if exact else (BLOCK_M, BLOCK_N)
    return queries[itemsize], positions[itemsize]


def prefix_attention(
    task: AttentionTask,
    sharing: Sharing,
    *,
    num_programs: int,
    exact: bool = False,
    block_m: int | None = None,
    block_n: int | None = None,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> None:
    size = task.kv.element_size()
    queries, positions = tile_of(size, exact=exact)
    block_m = block_m or queries
    assert not exact or block_m <= EXACT_BLOCK_M[size], "larger tiles are multiplied by other instructions (walk.py)"
    _prefix[(num_programs,)](
        *task.read,
        *sharing,
        *task.parts,
        *task.strides,
        task.scale,
        **task.shape,
        BLOCK_M=block_m,
        BLOCK_N=block_n or positions,
        EXACT=exact,
        num_warps=num_warps,
        num_stages=num_stages,
        **(EXACT_OPTIONS if exact else {}),
    )
