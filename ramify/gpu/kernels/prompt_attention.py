"""Attention of pieces of prompts: tiles of queries over keys and values in the cache, read through block tables.

    query q of a tile     row ROW + q // QUERIES_PER_ROW, head kv_head * QUERIES_PER_ROW + q % QUERIES_PER_ROW
    program p             takes tiles x key-value heads in turns, to and fro: p, 2P - 1 - p, 2P + p, ...

             positions   0 .............. POSITION ... + NUM_ROWS
    one tile             |  BLOCK_N  |  BLOCK_N  |\\ BLOCK_N |        a mask where rows see different positions only
                                                  \\

What a row computes depends on its own positions alone: every walk begins at position 0, and what is masked adds zero.
The number of programs is fixed and the number of tiles is read on the device, so a CUDA graph outlives its lists.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels import prompt_list
from ramify.gpu.kernels.walk import LOG2_OF_E, begin, read_tile

HEADER = tl.constexpr(prompt_list.HEADER)
TILE_FIELDS = tl.constexpr(prompt_list.TILE_FIELDS)
TABLE, ROW, NUM_ROWS, POSITION = map(tl.constexpr, range(prompt_list.TILE_FIELDS))
NUM_TILES, FIRST_BLOCK = map(tl.constexpr, range(2))

# By bytes of a number. float32 goes without matrix units and keeps its tiles in registers: larger ones would not fit.
BLOCK_M = {2: 128, 4: 16}  # queries of a tile: the list is cut by it too
BLOCK_N = {2: 64, 4: 32}
NUM_WARPS = {2: 8, 4: 4}
NUM_STAGES = 3
PROGRAMS_PER_PROCESSOR = 2


def rows_of_a_tile(queries_per_row: int, itemsize: int, block_m: int | None = None) -> int:
    """How many rows a tile takes, each with its queries of one key-value head."""
    return (block_m or BLOCK_M[itemsize]) // queries_per_row


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    queries,
    kv,
    work,
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
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(0, tl.cdiv(num_items, programs)):
        item = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if item < num_items:
            tile = work + HEADER + (item // KV_HEADS) * TILE_FIELDS
            table = blocks + tl.load(tile + TABLE)
            num_rows = tl.load(tile + NUM_ROWS)
            first = tl.load(tile + POSITION)
            kv_head = item % KV_HEADS
            # Queries past the last row stand in its place: they see something, and are not written.
            row_of_tile = tl.minimum(index // QUERIES_PER_ROW, num_rows - 1)
            real = index < num_rows * QUERIES_PER_ROW
            row = (tl.load(tile + ROW) + row_of_tile).to(tl.int64)
            head = kv_head * QUERIES_PER_ROW + index % QUERIES_PER_ROW
            asked = tl.load(queries + row[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :])
            output, total, peak = begin(BLOCK_M, HEAD_DIM)
            # All rows see what lies before the first one's own position, and it: no mask there.
            seen_by_all = (first + 1) // BLOCK_N * BLOCK_N
            output, total, peak = _walk(
                output,
                total,
                peak,
                asked,
                kv,
                table,
                kv_head,
                0,
                seen_by_all,
                first + row_of_tile,
                scale,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                MASKED=False,
            )
            output, total, peak = _walk(
                output,
                total,
                peak,
                asked,
                kv,
                table,
                kv_head,
                seen_by_all,
                first + num_rows,
                first + row_of_tile,
                scale,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                MASKED=True,
            )
            attended = (output / total[:, None]).to(out.dtype.element_ty)
            tl.store(
                out + row[:, None] * out_stride + head[:, None] * HEAD_DIM + dim[None, :], attended, mask=real[:, None]
            )


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    output,  # (BLOCK_M, HEAD_DIM) float32
    total,  # (BLOCK_M,) float32
    peak,  # (BLOCK_M,) float32, in powers of two
    asked,  # (BLOCK_M, HEAD_DIM)
    kv,
    table,
    kv_head,
    start,
    end,
    last,  # (BLOCK_M,) the last position that each query sees
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: all queries see all of it, and its length is a multiple of BLOCK_N
):
    offset = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    keys_of_head = kv + kv_head * HEAD_DIM + dim[None, :]
    for at in range(start, end, BLOCK_N):
        position = at + offset
        inside = position < end
        keys, values = read_tile(keys_of_head, table, position, inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MASKED)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee")
        if MASKED:
            scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
        # Every query sees position 0, so the peak is finite from the first tile on.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None]
        output = tl.dot(weights.to(values.dtype), values, output, input_precision="ieee")
        peak = new_peak
    return output, total, peak


def prompt_attention(
    queries: Tensor,
    kv: Tensor,
    work: Tensor,
    out: Tensor,
    /,
    *,
    block_size: int,
    num_programs: int,
    block_m: int | None = None,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int = NUM_STAGES,
) -> None:
    """queries (T, heads, head_dim), each row contiguous; kv (slots, 2, kv_heads, head_dim); work: a list built for
    `rows_of_a_tile` (prompt_list.py); writes the rows that it knows of out (T, heads * head_dim)."""
    _, heads, head_dim = queries.shape
    kv_heads, size = kv.shape[2], kv.element_size()
    _attend[(num_programs,)](
        queries,
        kv,
        work,
        out,
        queries.stride(0),
        out.stride(0),
        head_dim**-0.5 * LOG2_OF_E,
        KV_HEADS=kv_heads,
        QUERIES_PER_ROW=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m or BLOCK_M[size],
        BLOCK_N=block_n or BLOCK_N[size],
        num_warps=num_warps or NUM_WARPS[size],
        num_stages=num_stages,
    )
