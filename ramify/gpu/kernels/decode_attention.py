"""Decode attention: one query a row over stretches of its own keys and values.

    items            ROW, START, END, PART                  one stretch of one row
    programs         p, p + P, p + 2P, ...                  through items x key-value heads, heads fastest
    one item         the query heads of one key-value head, as a tile of at least 16, walk the stretch
    writes           out[row], where the row has one part (zeros where it has none: padding); else
                     partials[part, heads], lse[part, heads]

A row's parts are merged here too, those of shared prefixes among them. A counter per row and
key-value head shows which program wrote the last part: that one merges all of them in their order, so that the result
does not depend on which it was, and sets the counter back to 0.

With EXACT a row's output is folded from its parts as every other exact kernel folds them, one part too (walk.py). Where
rows are many an item is all that a row reads by itself, below zero as PART: its parts are folded where they are made,
after the shared ones, and none of them is ever in memory. That is the same to the bit.

The number of programs is fixed and the number of items is read on the device, so a CUDA graph outlives its lists.
NaN among a row's queries, keys or values reaches the parts of that row and no other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels import work_list
from ramify.gpu.kernels.attention_task import AttentionTask, Merging, merged_into
from ramify.gpu.kernels.overlap import LINE, launch_options, prefetch, start_next, wait_for_last
from ramify.gpu.kernels.parts_of_rows import folded_parts, is_last, leave, merged, with_parts
from ramify.gpu.kernels.walk import (
    EXACT_BLOCK_N,
    EXACT_OPTIONS,
    begin,
    begin_part,
    finish,
    fold,
    walk,
    walk_parts,
    whole,
)

# The columns of an item, and of what says where the items are.
OWN_FIELDS = tl.constexpr(work_list.OWN_FIELDS)
ROW, START, END, PART = map(tl.constexpr, range(work_list.OWN_FIELDS))
NUM_ITEMS, FIRST_ITEM = map(tl.constexpr, range(2))

BLOCK_N = 64
NUM_WARPS = 4
NUM_STAGES = 3
PROGRAMS_PER_PROCESSOR = (2, 8)  # at least, at most
PARTS_OF_A_ROW = 8  # that a launch has programs for, where rows are few
MOST_REGISTERS = 128  # of a thread, exactly: four programs then run on a processor at a time, without it two
FEWEST_QUERIES = 16  # what a matrix product takes


@triton.jit
def _decode(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    queries,
    kv,
    tables,
    count,
    items,
    partials,
    lse,
    first_part,
    num_parts,
    shared_parts,
    arrived,
    out,
    cuts,
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
    MERGES: tl.constexpr,
    SHARED: tl.constexpr,
    PER_LINE: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    num_items = tl.load(count + NUM_ITEMS)
    first_item = items + tl.load(count + FIRST_ITEM)
    heads: tl.constexpr = KV_HEADS * QUERIES_PER_ROW
    if OVERLAP and not SHARED:
        _prefetch(num_items, first_item, kv, tables, table_stride, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, PER_LINE)
    # Shared parts are asked for last. All that a walk reads was there before the kernel that writes them started.
    wait_for_last(OVERLAP and (EXACT or not SHARED))
    dim = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, PADDED_QUERIES)
    real = query < QUERIES_PER_ROW
    for work in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * OWN_FIELDS
        row = tl.load(item + ROW).to(tl.int64)
        start = tl.load(item + START)
        end = tl.load(item + END)
        part = tl.load(item + PART).to(tl.int64)
        kv_head = work % KV_HEADS
        head = kv_head * QUERIES_PER_ROW + query
        tile = tl.load(
            queries + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
            mask=real[:, None],
            other=0.0,
            cache_modifier=".cg",  # past the L1 cache, as where kernels overlap it may hold an earlier layer's
        )
        table = tables + row * table_stride
        output, total, peak = begin_part(PADDED_QUERIES, HEAD_DIM, EXACT)
        row_out = out + row * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
        if EXACT and MERGES:
            first_of_row = tl.load(first_part + row).to(tl.int64)
            first = first_of_row * heads + head
            of_row = tl.load(num_parts + row)
            shared = tl.load(shared_parts + row) if SHARED else 0
            is_whole = part < 0
            part = tl.where(is_whole, -1 - part, part)
            folded, weight, top = begin(PADDED_QUERIES, HEAD_DIM)
            if SHARED:
                before = tl.where(is_whole, shared, 0)
                folded, weight, top = folded_parts(
                    folded, weight, top, partials, lse, first, before, real, heads, HEAD_DIM
                )
            folded, weight, top, output, total, peak = walk_parts(
                folded,
                weight,
                top,
                output,
                total,
                peak,
                tile,
                kv,
                table,
                kv_head,
                start,
                end,
                cuts + (part - first_of_row) + 1,  # parts are those between cuts, from the first on
                scale,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
            )
            if is_whole:
                values, score = finish(output, total, peak, EXACT=True)
                folded, weight, top = fold(folded, weight, top, values, score)
                tl.store(row_out, whole(folded, weight).to(out.dtype.element_ty), mask=real[:, None])
            else:
                leave(output, total, peak, partials, lse, part * heads + head, real, HEAD_DIM, EXACT)
                if is_last(arrived + row * KV_HEADS + kv_head, of_row - shared):
                    outcome = merged(partials, lse, first, of_row, real, heads, PADDED_QUERIES, HEAD_DIM, EXACT)
                    tl.store(row_out, outcome.to(out.dtype.element_ty), mask=real[:, None])
        else:
            # One masked loop: a second one for the last tile would wait for memory twice, and the mask costs little.
            output, total, peak = walk(
                output,
                total,
                peak,
                tile,
                kv,
                table,
                kv_head,
                start,
                end,
                scale,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                MASKED=True,
                EXACT=EXACT,
            )
            if MERGES:
                of_row = tl.load(num_parts + row)
                shared = tl.load(shared_parts + row) if SHARED else 0
                first = tl.load(first_part + row).to(tl.int64) * heads + head
                if of_row - shared == 1:  # what needs no other part than shared ones stays in registers
                    wait_for_last(OVERLAP and SHARED)
                    outcome = with_parts(output, total, peak, partials, lse, first, shared, real, heads, HEAD_DIM)
                    tl.store(row_out, outcome.to(out.dtype.element_ty), mask=real[:, None])
                else:
                    leave(output, total, peak, partials, lse, part * heads + head, real, HEAD_DIM, EXACT)
                    if is_last(arrived + row * KV_HEADS + kv_head, of_row - shared):
                        wait_for_last(OVERLAP and SHARED)
                        outcome = merged(partials, lse, first, of_row, real, heads, PADDED_QUERIES, HEAD_DIM, EXACT)
                        tl.store(row_out, outcome.to(out.dtype.element_ty), mask=real[:, None])
            else:
                leave(output, total, peak, partials, lse, part * heads + head, real, HEAD_DIM, EXACT)
    wait_for_last(OVERLAP and SHARED)
    if MERGES:
        for other in range(tl.program_id(0), rows, tl.num_programs(0)):
            shared = tl.load(shared_parts + other) if SHARED else 0
            if tl.load(num_parts + other) == shared:  # padding, or a row that shares all of its positions
                first = tl.load(first_part + other).to(tl.int64) * heads + query
                row_out = out + other * out_stride + query[:, None] * HEAD_DIM + dim[None, :]
                for kv_head in range(KV_HEADS):
                    outcome = tl.zeros([PADDED_QUERIES, HEAD_DIM], dtype=tl.float32)
                    at = kv_head * QUERIES_PER_ROW
                    if shared > 0:
                        outcome = merged(
                            partials, lse, first + at, shared, real, heads, PADDED_QUERIES, HEAD_DIM, EXACT
                        )
                    tl.store(row_out + at * HEAD_DIM, outcome.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _prefetch(  # type: ignore[no-untyped-def]
    num_items,
    first_item,
    kv,
    tables,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """Asks for this program's first tile before the wait: lists and tables are complete, and so are the keys and values
    of all positions but the newest."""
    work = tl.program_id(0)
    if work < num_items * KV_HEADS:
        item = first_item + (work // KV_HEADS) * OWN_FIELDS
        table = tables + tl.load(item + ROW).to(tl.int64) * table_stride
        position = tl.minimum(tl.load(item + START) + tl.arange(0, BLOCK_N), tl.load(item + END) - 1)
        slot = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        keys_to_values: tl.constexpr = KV_HEADS * HEAD_DIM
        keys = kv + slot * (2 * keys_to_values) + (work % KV_HEADS) * HEAD_DIM
        for line in tl.static_range(0, HEAD_DIM, PER_LINE):
            prefetch(keys + line)
            prefetch(keys + keys_to_values + line)


def decode_attention(
    task: AttentionTask,
    merging: Merging | None,
    *,
    num_programs: int,
    overlap: bool = False,
    exact: bool = False,
    cuts: Tensor | None = None,
    block_n: int | None = None,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
    max_registers: int | None = MOST_REGISTERS,
) -> None:
    """With `merging`, outputs are written too. With `overlap` the list was complete before the preceding kernel began.
    Exact outputs want `cuts`, int32: where parts begin, from 0 to at least the last position, multiples of
    `block_n`."""
    assert cuts is not None or not exact or merging is None, "who merges exactly knows where parts begin"
    size = task.kv.element_size()
    lists, out_stride, constants = merged_into(task, merging)
    _decode[(num_programs,)](
        *task.read,
        *task.parts,
        *lists,
        task.count if cuts is None else cuts,
        task.queries.shape[0],
        *task.strides,
        out_stride,
        task.scale,
        **task.shape,
        **constants,
        PADDED_QUERIES=padded_queries(task),
        BLOCK_N=block_n or (EXACT_BLOCK_N[size] if exact else BLOCK_N),
        PER_LINE=LINE // size,
        EXACT=exact,
        num_warps=num_warps,
        num_stages=num_stages,
        **({**EXACT_OPTIONS, "maxnreg": max_registers} if exact else {}),
        **launch_options(overlap),
    )


def padded_queries(task: AttentionTask) -> int:
    """The query heads of one key-value head, as many as a tile has."""
    padded: int = triton.next_power_of_2(task.shape["QUERIES_PER_ROW"])
    return max(FEWEST_QUERIES, padded)
