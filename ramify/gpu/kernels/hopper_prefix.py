"""Shared-prefix attention for Hopper's matrix units: what prefix_attention.py does and launches, scheduled by hand.

    copies        keys of tile t + 1, values of tile t
    matrix units  scores of tile t + 1 | output += weights of tile t @ values of tile t
    others                             | softmax of tile t + 1

Triton's own pipeline waits for a tile's output before it starts the next softmax, so that the matrix units stand still
for as long as a softmax takes. Here the order of copies, products and waits is written down: Gluon, Triton's lower
language, for numbers of two bytes. A stretch is walked from its last tile, the only one that may need a mask, to its
first.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramify.gpu.kernels import work_list
from ramify.gpu.kernels.attention_task import AttentionTask, Sharing
from ramify.gpu.kernels.overlap import launch_options

PREFIX_FIELDS = gl.constexpr(work_list.PREFIX_FIELDS)
PREFIX, START, END, FIRST_QUERY, NUM_QUERIES, SPLIT = map(gl.constexpr, range(work_list.PREFIX_FIELDS))
SHARING_FIELDS = gl.constexpr(work_list.GROUP_FIELDS)
TABLE_ROW, FIRST_SHARER = map(gl.constexpr, range(work_list.GROUP_FIELDS))
NUM_ITEMS, FIRST_ITEM = map(gl.constexpr, range(2))
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _queries(item, first_sharer, QUERIES_PER_ROW: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The rows and heads (of those that read one key-value head) of an item's queries, and which of them there are."""
    index = gl.arange(0, BLOCK_M, layout=LAYOUT)
    query = gl.load(item + FIRST_QUERY) + index
    inside = index < gl.load(item + NUM_QUERIES)
    row = gl.load(first_sharer + query // QUERIES_PER_ROW, mask=inside, other=0).to(gl.int64)
    return row, query % QUERIES_PER_ROW, inside


@gluon.jit
def _slots(table, at, start, last, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where positions at .. at + BLOCK_N lie. Past the last one the last stands again: what lies there may be anything,
    NaN too. Before the start is nothing to walk: any slots will do."""
    offset = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    position = gl.minimum(gl.maximum(at, start) + offset, last).to(gl.uint32)
    return gl.load(table + position // BLOCK_SIZE) * BLOCK_SIZE + (position % BLOCK_SIZE).to(gl.int32)


@gluon.jit
def _copy(target, source, slots, SLOT_STRIDE: gl.constexpr):  # type: ignore[no-untyped-def]
    """source (1, HEAD_DIM) -> the keys of one head at slot 0, or its values."""
    # A pool may hold more than 2^31 numbers.
    async_copy.async_copy_global_to_shared(target, source + (slots.to(gl.int64) * SLOT_STRIDE)[:, None])


@gluon.jit
def _wait(OVERLAP: gl.constexpr):  # type: ignore[no-untyped-def]
    """For the queries. Shared positions were there before the step, and may be read earlier; the next kernel may start
    once the wait is over, and reads what was written before this kernel."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def _weigh(scores, peak, total, scale, number: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's weights, by how much the output so far shrinks, and peak and total with the tile (walk.py)."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    shrink = gl.exp2(peak - new_peak)
    exponentials = gl.exp2(scores * scale - new_peak[:, None])
    total = total * shrink + gl.sum(exponentials, 1)
    return gl.convert_layout(exponentials.to(number), LAYOUT), shrink, new_peak, total


@gluon.jit
def _walk(  # type: ignore[no-untyped-def]
    queries,  # (BLOCK_M, HEAD_DIM), in registers or in shared memory
    keys,  # shared memory (2, BLOCK_N, HEAD_DIM); the last tile's are on their way to 0, the ones before to 1
    values,  # the last tile's are on their way to 0
    head_keys,
    head_values,
    table,
    slots,  # of the tile before the last
    start,
    last,
    scale,
    SLOT_STRIDE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COPIED: gl.constexpr,
    SCORED: gl.constexpr,
    ATTENDED: gl.constexpr,
):
    weighed: gl.constexpr = gl.DotOperandLayout(0, ATTENDED, 2)
    number: gl.constexpr = keys.dtype
    num_tiles = (last - start) // BLOCK_N + 1
    at = start + (num_tiles - 1) * BLOCK_N
    async_copy.wait_group(1)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORED)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), nothing, use_acc=False)
    position = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORED))
    scores = gl.where((position <= last)[None, :], scores, float("-inf"))
    peak = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORED))
    total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORED))
    weights, _, peak, total = _weigh(scores, peak, total, scale, number, weighed)
    output = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, layout=ATTENDED)
    for turn in range(1, num_tiles):
        at -= BLOCK_N
        async_copy.wait_group(0)
        new_scores = warpgroup_mma(queries, keys.index(turn % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
        new_output = warpgroup_mma(weights, values.index((turn + 1) % 2), output, is_async=True)
        _copy(values.index(turn % 2), head_values, slots, SLOT_STRIDE)
        slots = _slots(table, at - BLOCK_N, start, last, BLOCK_SIZE, BLOCK_N, COPIED)
        _copy(keys.index((turn + 1) % 2), head_keys, slots, SLOT_STRIDE)
        async_copy.commit_group()
        scores = warpgroup_mma_wait(1, deps=[new_scores])
        new_weights, shrink, peak, total = _weigh(scores, peak, total, scale, number, weighed)
        output, weights = warpgroup_mma_wait(0, deps=[new_output, weights])
        output = output * gl.convert_layout(shrink, gl.SliceLayout(1, ATTENDED))[:, None]
        weights = new_weights
    async_copy.wait_group(0)
    output = warpgroup_mma(weights, values.index((num_tiles + 1) % 2), output)
    total = gl.convert_layout(total, gl.SliceLayout(1, ATTENDED))
    return output / total[:, None], gl.convert_layout(peak, gl.SliceLayout(1, ATTENDED)) * LN_2 + gl.log(total)


@gluon.jit
def scheduled_prefix(  # type: ignore[no-untyped-def]
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
    KV_HEADS: gl.constexpr,
    QUERIES_PER_ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HOLDS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    warps: gl.constexpr = gl.num_warps()
    number: gl.constexpr = kv.dtype.element_ty
    keys_to_values: gl.constexpr = KV_HEADS * HEAD_DIM
    slot_stride: gl.constexpr = 2 * keys_to_values
    # Sixteen bytes a thread.
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [warps, 1], [1, 0])
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])
    attended: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, HEAD_DIM, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    asked = gl.allocate_shared_memory(number, [BLOCK_M, HEAD_DIM], shared)
    keys = gl.allocate_shared_memory(number, [2, BLOCK_N, HEAD_DIM], shared)
    values = gl.allocate_shared_memory(number, [2, BLOCK_N, HEAD_DIM], shared)

    num_items = gl.load(count + NUM_ITEMS)
    first_item = items + gl.load(count + FIRST_ITEM)
    for work in range(gl.program_id(0), num_items * KV_HEADS, gl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * PREFIX_FIELDS
        prefix = prefixes + gl.load(item + PREFIX) * SHARING_FIELDS
        start = gl.load(item + START)
        last = gl.load(item + END) - 1
        table = tables + gl.load(prefix + TABLE_ROW).to(gl.int64) * table_stride
        first_sharer = sharers + gl.load(prefix + FIRST_SHARER)
        first_head = work % KV_HEADS * QUERIES_PER_ROW

        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copied))
        head_keys = (kv + work % KV_HEADS * HEAD_DIM + dim)[None, :]
        head_values = head_keys + keys_to_values
        at = start + (last - start) // BLOCK_N * BLOCK_N
        slots = _slots(table, at, start, last, BLOCK_SIZE, BLOCK_N, copied)
        _copy(keys.index(0), head_keys, slots, slot_stride)
        async_copy.commit_group()
        _copy(values.index(0), head_values, slots, slot_stride)
        slots = _slots(table, at - BLOCK_N, start, last, BLOCK_SIZE, BLOCK_N, copied)
        _copy(keys.index(1), head_keys, slots, slot_stride)
        async_copy.commit_group()

        row, head, inside = _queries(item, first_sharer, QUERIES_PER_ROW, BLOCK_M, gl.SliceLayout(1, copied))
        source = queries + row[:, None] * query_stride + ((first_head + head) * HEAD_DIM)[:, None] + dim[None, :]
        _wait(OVERLAP)
        asked.store(gl.load(source, mask=inside[:, None], other=0.0))
        if HOLDS:
            held = asked.load(gl.DotOperandLayout(0, scored, 2))
        else:
            fence_async_shared()  # threads wrote them, which the matrix units do not see otherwise
            held = asked
        output, score = _walk(
            held,
            keys,
            values,
            head_keys,
            head_values,
            table,
            slots,
            start,
            last,
            scale,
            slot_stride,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_M,
            BLOCK_N,
            copied,
            scored,
            attended,
        )
        row, head, inside = _queries(item, first_sharer, QUERIES_PER_ROW, BLOCK_M, gl.SliceLayout(1, attended))
        part = gl.load(first_part + row, mask=inside, other=0).to(gl.int64) + gl.load(item + SPLIT)
        target = part * (KV_HEADS * QUERIES_PER_ROW) + first_head + head
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, attended))
        gl.store(partials + target[:, None] * HEAD_DIM + dim[None, :], output, mask=inside[:, None])
        gl.store(lse + target, score, mask=inside)
    _wait(OVERLAP)


BLOCK_M, BLOCK_N, NUM_WARPS, PROGRAMS_PER_PROCESSOR = 64, 64, 4, 2
HEAD_DIMS = (64, 128)
# Of a thread, where a small program of another kernel (own_parts.py) shall fit beside two of this one.
REGISTERS_BESIDE_OTHERS = 192


def scheduled(
    task: AttentionTask,
    sharing: Sharing,
    *,
    num_programs: int,
    overlap: bool = False,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
    num_warps: int = NUM_WARPS,
    max_registers: int | None = None,
) -> None:
    """A warp takes 16 queries."""
    scheduled_prefix[(num_programs,)](
        *task.read,
        *sharing,
        *task.parts,
        *task.strides,
        task.scale,
        **task.shape,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HOLDS=True,
        num_warps=num_warps,
        maxnreg=max_registers,
        **launch_options(overlap),
    )


def can_schedule(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether these are the matrix units and the numbers that this kernel is written for."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and dtype.itemsize == 2 and head_dim in HEAD_DIMS
