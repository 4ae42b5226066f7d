"""Decode attention: one query a row over stretches of its own keys and values.

    items            (row, kv_start, kv_end, part)          one stretch of one row
    programs         p, p + P, p + 2P, ...                  through items x key-value heads, heads fastest
    one item         the query heads of one key-value head, as a tile of at least 16, walk the stretch
    writes           partials[part, heads], lse[part, heads]

The number of programs is fixed and the number of items is read on the device, so a CUDA graph outlives its lists.
NaN among a row's queries, keys or values reaches the parts of that row and no other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.walk import LOG2_OF_E, begin, finish, walk

BLOCK_N = 64
NUM_WARPS = 4
NUM_STAGES = 3
PROGRAMS_PER_PROCESSOR = 8
FEWEST_QUERIES = 16  # what a matrix product takes


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    queries,
    kv,
    tables,
    count,
    items,
    partials,
    lse,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_items = tl.load(count)
    first_item = items + tl.load(count + 1)
    dim = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, PADDED_GROUP)
    real = query < GROUP
    for work in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * 4
        row = tl.load(item).to(tl.int64)
        start = tl.load(item + 1)
        end = tl.load(item + 2)
        part = tl.load(item + 3).to(tl.int64)
        kv_head = work % KV_HEADS
        head = kv_head * GROUP + query
        tile = tl.load(
            queries + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=real[:, None], other=0.0
        )
        output, total, peak = begin(PADDED_GROUP, HEAD_DIM)
        # One masked loop: a second one for the last tile would wait for memory twice, and the mask costs little here.
        output, total, peak = walk(
            output,
            total,
            peak,
            tile,
            kv,
            tables + row * table_stride,
            kv_head,
            start,
            end,
            scale,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            MASKED=True,
        )
        output, score = finish(output, total, peak)
        target = part * (KV_HEADS * GROUP) + head
        tl.store(partials + target[:, None] * HEAD_DIM + dim[None, :], output, mask=real[:, None])
        tl.store(lse + target, score, mask=real)


def decode_attention(
    queries: Tensor,
    kv: Tensor,
    tables: Tensor,
    count: Tensor,
    items: Tensor,
    partials: Tensor,
    lse: Tensor,
    /,
    *,
    block_size: int,
    num_programs: int,
    block_n: int = BLOCK_N,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> None:
    """queries (rows, heads, head_dim), each row contiguous; kv (slots, 2, kv_heads, head_dim); tables int32 (rows,
    max_blocks); count int32 (2,): the number of items, and where in `items` (flat int32) the first begins; partials
    float32 (parts, heads, head_dim) and lse float32 (parts, heads) are written."""
    _, heads, head_dim = queries.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    _decode[(num_programs,)](
        queries,
        kv,
        tables,
        count,
        items,
        partials,
        lse,
        queries.stride(0),
        tables.stride(0),
        head_dim**-0.5 * LOG2_OF_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED_GROUP=max(FEWEST_QUERIES, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
