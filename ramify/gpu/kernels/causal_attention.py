"""Attention of pieces of prompts in the parts that decodes have: a row's output has the same bits by either kernel.

    query q of a tile     row ROW + q // QUERIES_PER_ROW, head kv_head * QUERIES_PER_ROW + q % QUERIES_PER_ROW
    program p             takes tiles x key-value heads in turns: p, p + P, p + 2P, ...

             positions    0            cut          cut      POSITION ... + NUM_ROWS
    one tile              |  part 0     |   part 1   |  part 2   |\\
                                                                   \\   rows see different positions here only

A tile walks from position 0, cut by cut (`PositionCuts`). At each cut the part is finished and folded into those before
it, in registers, as `decode_attention` and `merge` do with the parts of a decode; see walk.py. The list of tiles is
that of prompt_list.py, and its length is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels import prompt_list
from ramify.gpu.kernels.walk import (
    EXACT_BLOCK_M,
    EXACT_BLOCK_N,
    EXACT_OPTIONS,
    LOG2_OF_E,
    begin,
    begin_part,
    finish,
    fold,
    walk_to_the_end,
    whole,
)

HEADER = tl.constexpr(prompt_list.HEADER)
TILE_FIELDS = tl.constexpr(prompt_list.TILE_FIELDS)
TABLE, ROW, NUM_ROWS, POSITION = map(tl.constexpr, range(prompt_list.TILE_FIELDS))
NUM_TILES, FIRST_BLOCK = map(tl.constexpr, range(2))

NUM_WARPS = 4
NUM_STAGES = 2
PROGRAMS_PER_PROCESSOR = 2


def rows_of_a_tile(queries_per_row: int, itemsize: int) -> int:
    """How many rows a tile takes, each with its queries of one key-value head."""
    return EXACT_BLOCK_M[itemsize] // queries_per_row


@triton.jit
def _causal(  # type: ignore[no-untyped-def]
    queries,
    kv,
    work,
    cuts,
    out,
    query_stride,
    out_stride,
    scale,
    KV_HEADS: tl.constexpr,
    QUERIES_PER_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_items = tl.load(work + NUM_TILES) * KV_HEADS
    blocks = work + tl.load(work + FIRST_BLOCK)
    dim = tl.arange(0, HEAD_DIM)
    index = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile = work + HEADER + item // KV_HEADS * TILE_FIELDS
        table = blocks + tl.load(tile + TABLE)
        num_rows = tl.load(tile + NUM_ROWS)
        position = tl.load(tile + POSITION)
        kv_head = item % KV_HEADS
        offset = index // QUERIES_PER_ROW
        real = offset < num_rows
        row = (tl.load(tile + ROW) + offset).to(tl.int64)
        head = kv_head * QUERIES_PER_ROW + index % QUERIES_PER_ROW
        here = head[:, None] * HEAD_DIM + dim[None, :]
        tile_queries = tl.load(queries + row[:, None] * query_stride + here, mask=real[:, None], other=0.0)
        limits = tl.where(real, position + offset + 1, 0)
        last = position + num_rows
        folded, weight, top = begin(BLOCK_M, HEAD_DIM)
        start = 0
        cut = cuts
        while start < last:
            cut += 1
            end = tl.minimum(tl.load(cut), last)
            # Up to the first row's own position all rows see everything: no mask, the same numbers.
            full_end = start + tl.maximum(tl.minimum(end, position + 1) - start, 0) // BLOCK_N * BLOCK_N
            output, total, peak = begin_part(BLOCK_M, HEAD_DIM, EXACT=True)
            output, total, peak = walk_to_the_end(
                output,
                total,
                peak,
                tile_queries,
                kv,
                table,
                kv_head,
                start,
                full_end,
                end,
                scale,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                EXACT=True,
                CAUSAL=True,
                limits=limits,
            )
            values, score = finish(output, total, peak, EXACT=True)
            folded, weight, top = fold(folded, weight, top, values, score)
            start = end
        attended = whole(folded, weight).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * out_stride + here, attended, mask=real[:, None])


def causal_attention(
    queries: Tensor,
    kv: Tensor,
    work: Tensor,
    cuts: Tensor,
    out: Tensor,
    /,
    *,
    block_size: int,
    num_programs: int,
    block_n: int | None = None,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> None:
    """queries (rows, heads, head_dim), each row contiguous; kv (slots, 2, kv_heads, head_dim); work int32: a prompt
    list with `rows_of_a_tile`, whose rows are those of queries and of out (rows, heads * head_dim); cuts int32, from 0
    to at least the last position."""
    _, heads, head_dim = queries.shape
    kv_heads = kv.shape[2]
    _causal[(num_programs,)](
        queries,
        kv,
        work,
        cuts,
        out,
        queries.stride(0),
        out.stride(0),
        head_dim**-0.5 * LOG2_OF_E,
        KV_HEADS=kv_heads,
        QUERIES_PER_ROW=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=EXACT_BLOCK_M[kv.element_size()],
        BLOCK_N=block_n or EXACT_BLOCK_N[kv.element_size()],
        num_warps=num_warps,
        num_stages=num_stages,
        **EXACT_OPTIONS,
    )
