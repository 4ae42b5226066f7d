"""Parts of rows' own positions, read while the kernel of shared prefixes computes.

    prefix kernel    |==== matrix units, two programs a processor or one ====|
    this one           |= memory, one small program a processor =|= more =|  wait
    merge.py                                                                 |=|

Matrix units and memory are busy at the same time only if programs of both kernels fit on a processor: so that one has
fewer registers than it could use, and this one few. Whoever is there takes the next stretch from a counter: the
programs that fit beside the other kernel as long as it runs, and the others when it has ended. Which program walks a
stretch changes nothing of its part.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.attention_task import AttentionTask
from ramify.gpu.kernels.decode_attention import (
    END,
    FIRST_ITEM,
    NUM_ITEMS,
    OWN_FIELDS,
    PART,
    ROW,
    START,
    padded_queries,
)
from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.parts_of_rows import leave
from ramify.gpu.kernels.walk import begin_part, walk

BLOCK_N = 32
NUM_WARPS = 4
NUM_STAGES = 7  # three tiles of keys and values: the block table's load takes stages too
MOST_REGISTERS = 104  # of a thread: what is left beside the kernels of prefixes
PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _own_parts(  # type: ignore[no-untyped-def]
    queries,
    kv,
    tables,
    count,
    items,
    partials,
    lse,
    taken,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    QUERIES_PER_ROW: tl.constexpr,
    PADDED_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    num_works = tl.load(count + NUM_ITEMS) * KV_HEADS
    first_item = items + tl.load(count + FIRST_ITEM)
    dim = tl.arange(0, HEAD_DIM)
    query = tl.arange(0, PADDED_QUERIES)
    real = query < QUERIES_PER_ROW
    work = tl.atomic_add(taken, 1, sem="relaxed")
    while work < num_works:
        following = tl.atomic_add(taken, 1, sem="relaxed")  # it is known by the time that this stretch is walked
        item = first_item + (work // KV_HEADS) * OWN_FIELDS
        row = tl.load(item + ROW).to(tl.int64)
        part = tl.load(item + PART).to(tl.int64)
        kv_head = work % KV_HEADS
        head = kv_head * QUERIES_PER_ROW + query
        tile = tl.load(
            queries + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
            mask=real[:, None],
            other=0.0,
            cache_modifier=".cg",  # past the L1 cache, as where kernels overlap it may hold an earlier layer's
        )
        output, total, peak = begin_part(PADDED_QUERIES, HEAD_DIM, EXACT=False)
        output, total, peak = walk(
            output,
            total,
            peak,
            tile,
            kv,
            tables + row * table_stride,
            kv_head,
            tl.load(item + START),
            tl.load(item + END),
            scale,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            MASKED=True,
        )
        target = part * (KV_HEADS * QUERIES_PER_ROW) + head
        leave(output, total, peak, partials, lse, target, real, HEAD_DIM, EXACT=False)
        work = following
    wait_for_last(OVERLAP)


def own_parts(
    task: AttentionTask,
    taken: Tensor,
    *,
    num_programs: int,
    overlap: bool = False,
    block_n: int = BLOCK_N,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
    max_registers: int | None = MOST_REGISTERS,
) -> None:
    """As decode_attention.decode_attention without `merging`. taken, int32 (1,), is 0 before, and no longer after."""
    _own_parts[(num_programs,)](
        *task.read,
        *task.parts,
        taken,
        *task.strides,
        task.scale,
        **task.shape,
        PADDED_QUERIES=padded_queries(task),
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=max_registers,
        **launch_options(overlap),
    )
