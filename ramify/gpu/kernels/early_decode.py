"""Decode attention for few rows: keys and values come while the kernels before are still at work.

    positions of an item   start ............ tail .. end
                           | BLOCK_N |  ...  | TAIL |
    before the wait        its first tile of keys and values, and the places of its last positions
    after it               the queries and the last positions, which the kernel before writes; then what lies between

Few rows are no matter of bytes: what takes time is one thing waiting for another, a list for its item, a table for its
block, keys for their addresses. All that a step does not write is there before the step begins, and in a step of single
rows that is everything of a row but its newest positions. It is asked for before this kernel waits for the one before
it, and what is left to come afterwards is the row's own query and TAIL positions. Beside pieces of prompts it may not
be used: a row may begin behind blocks that one of them writes in this very step.

Items, parts and how they are merged are those of decode_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.engine.plan import MOST_DRAFTED
from ramify.gpu.kernels.attention_task import AttentionTask, Merging
from ramify.gpu.kernels.decode_attention import (
    END,
    FEWEST_QUERIES,
    FIRST_ITEM,
    NUM_ITEMS,
    OWN_FIELDS,
    PART,
    ROW,
    START,
)
from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.parts_of_rows import is_last, leave, read_part
from ramify.gpu.kernels.walk import begin, finish, walk

BLOCK_N = 64
TAIL = 16  # positions: what a matrix product takes, and more than a step writes of any row
NUM_WARPS = 4
NUM_STAGES = 3
PARTS_AT_ONCE = 8  # that whoever merges asks for at a time
MOST_PAIRS = 64  # of row and key-value head: beyond, bytes are what attention waits for
assert MOST_DRAFTED < TAIL, "a step writes no other positions of a row"


@triton.jit
def _places(table, position, inside, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where positions stand in the pool, in numbers; a pool may hold more than 2^31 of them."""
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + position % BLOCK_SIZE) * (2 * KV_HEADS * HEAD_DIM)


@triton.jit
def _early_decode(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    queries,
    kv,
    tables,
    count,
    items,
    partials,
    lse,
    first_part,
    num_parts,
    arrived,
    out,
    rows,
    query_stride,
    table_stride,
    out_stride,
    scale,
    KV_HEADS: tl.constexpr,
    QUERIES_PER_ROW: tl.constexpr,
    PADDED_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP and STARTS == 0)
    num_items = tl.load(count + NUM_ITEMS)
    first_item = items + tl.load(count + FIRST_ITEM)
    heads: tl.constexpr = KV_HEADS * QUERIES_PER_ROW
    to_values: tl.constexpr = KV_HEADS * HEAD_DIM
    dim = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, PADDED_QUERIES)
    real = query < QUERIES_PER_ROW
    for work in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * OWN_FIELDS
        row = tl.load(item + ROW).to(tl.int64)
        start = tl.load(item + START)
        end = tl.load(item + END)
        part = tl.load(item + PART).to(tl.int64)
        of_row = tl.load(num_parts + row)
        kv_head = work % KV_HEADS
        head = kv_head * QUERIES_PER_ROW + query
        first = tl.load(first_part + row).to(tl.int64) * heads + head
        table = tables + row * table_stride
        keys_of_head = kv + kv_head * HEAD_DIM + dim[None, :]

        tail = tl.maximum(start, end - TAIL)
        position = start + tl.arange(0, BLOCK_N)
        inside = position < tail
        pointers = keys_of_head + _places(table, position, inside, BLOCK_SIZE, KV_HEADS, HEAD_DIM)[:, None]
        # Volatile: the compiler would move them behind the wait, to where they are used.
        keys = tl.load(pointers, mask=inside[:, None], other=0.0, volatile=True)
        values = tl.load(pointers + to_values, mask=inside[:, None], other=0.0, volatile=True)
        last_position = tail + tl.arange(0, TAIL)
        is_there = last_position < end
        last = keys_of_head + _places(table, last_position, is_there, BLOCK_SIZE, KV_HEADS, HEAD_DIM)[:, None]
        wait_for_last(OVERLAP)

        # Volatile again: past the L1 cache, which may hold what was there before.
        of_head = queries + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :]
        tile = tl.load(of_head, mask=real[:, None], other=0.0, volatile=True)
        last_keys = tl.load(last, mask=is_there[:, None], other=0.0, volatile=True)
        last_values = tl.load(last + to_values, mask=is_there[:, None], other=0.0, volatile=True)
        if OVERLAP:
            tile, last_keys, last_values = _all_there(tile, last_keys, last_values)
        start_next(OVERLAP and STARTS == 1)
        scores = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        last_scores = tl.dot(tile, tl.trans(last_keys), input_precision="ieee") * scale
        last_scores = tl.where(is_there[None, :], last_scores, float("-inf"))
        peak = tl.maximum(tl.max(scores, 1), tl.max(last_scores, 1))  # finite: an item has a last position
        weights = tl.exp2(scores - peak[:, None])
        last_weights = tl.exp2(last_scores - peak[:, None])
        total = tl.sum(weights, 1) + tl.sum(last_weights, 1)
        output = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        output = tl.dot(last_weights.to(values.dtype), last_values, output, input_precision="ieee")
        if start + BLOCK_N < tail:
            output, total, peak = walk(
                output,
                total,
                peak,
                tile,
                kv,
                table,
                kv_head,
                start + BLOCK_N,
                tail,
                scale,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                MASKED=True,
            )
        row_out = out + row * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
        if of_row == 1:
            whole, _ = finish(output, total, peak)
            tl.store(row_out, whole.to(out.dtype.element_ty), mask=real[:, None])
        else:
            leave(output, total, peak, partials, lse, part * heads + head, real, HEAD_DIM, False)
            if is_last(arrived + row * KV_HEADS + kv_head, of_row):
                merged = _merged(partials, lse, first, of_row, real, heads, PADDED_QUERIES, HEAD_DIM, AT_ONCE)
                tl.store(row_out, merged.to(out.dtype.element_ty), mask=real[:, None])
    wait_for_last(OVERLAP)
    # By those that had the fewest items, which are the last.
    for other in range(tl.num_programs(0) - 1 - tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(num_parts + other) == 0:  # padding
            row_out = out + other * out_stride + query[:, None] * HEAD_DIM + dim[None, :]
            nothing = tl.zeros([PADDED_QUERIES, HEAD_DIM], dtype=out.dtype.element_ty)
            for kv_head in range(KV_HEADS):
                tl.store(row_out + kv_head * QUERIES_PER_ROW * HEAD_DIM, nothing, mask=real[:, None])


@triton.jit
def _all_there(first, second, third):  # type: ignore[no-untyped-def]
    """The same three: none is used, and waited for, before all have been asked for."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $3; mov.b32 $1, $4; mov.b32 $2, $5;",
        "=r,=r,=r,r,r,r",
        [first, second, third],
        dtype=(first.dtype, first.dtype, first.dtype),
        is_pure=False,
        pack=32 // first.dtype.primitive_bitwidth,
    )


@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    partials,
    lse,
    source,
    count,
    real,
    HEADS: tl.constexpr,
    PADDED_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """`count` parts of some heads, the first at `source`, merged by log-sum-exp; so many at a time are on their way."""
    output, total, peak = begin(PADDED_QUERIES, HEAD_DIM)
    for first in range(0, count, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            is_part = first + index < count
            values, score = read_part(partials, lse, source + (first + index) * HEADS, real & is_part, HEAD_DIM)
            score = tl.where(is_part, score, float("-inf"))
            new_peak = tl.maximum(peak, score)  # finite: the first part is there, and has seen a position
            weight = tl.exp(score - new_peak)
            shrink = tl.exp(peak - new_peak)
            output = output * shrink[:, None] + values * weight[:, None]
            total = total * shrink + weight
            peak = new_peak
    return output / total[:, None]


def early_decode(
    task: AttentionTask,
    merging: Merging,
    *,
    num_programs: int,
    overlap: bool = False,
    block_n: int = BLOCK_N,
    num_warps: int = NUM_WARPS,
    starts: int = 0,
) -> None:
    """As decode_attention, without shared prefixes. What was written of a row before the kernel before this one began
    is all but its last TAIL positions at most."""
    assert merging.shared_parts is None, "shared prefixes are read by others"
    shape = task.shape
    padded = max(FEWEST_QUERIES, triton.next_power_of_2(shape["QUERIES_PER_ROW"]))
    _early_decode[(num_programs,)](
        *task.read,
        *task.parts,
        merging.first_part,
        merging.num_parts,
        merging.arrived,
        merging.out,
        task.queries.shape[0],
        *task.strides,
        merging.out.stride(0),
        task.scale,
        **shape,
        PADDED_QUERIES=padded,
        BLOCK_N=block_n,
        TAIL=max(TAIL, padded),
        AT_ONCE=PARTS_AT_ONCE,
        STARTS=starts,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
        **launch_options(overlap),
    )
