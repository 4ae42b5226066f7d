"""Decode attention in whole blocks: what decode_attention.py does, with copies that run ahead of the work.

    a tile       TILE positions of HEADS key-value heads: where those are all heads, whole blocks as they lie in memory
    copies       | t + 2 | t + 3 | t + 4 | ...       also while an item ends and the next begins
    a program    | tile t| t + 1 | t + 2 | ...       its items' tiles, one after the other

A program of decode_attention.py reads one head's 256 bytes here and there, and stands still between two items until the
first keys of the next have come. Here few programs have much on its way at any time, in pieces as long as they can be;
warps share out heads, then positions. Gluon, Triton's lower language, for numbers of two bytes; matrix instructions of
one warp, so any head has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramify.gpu.kernels import work_list
from ramify.gpu.kernels.attention_task import AttentionTask, Merging, merged_into
from ramify.gpu.kernels.block_copies import copy_tile, prefetch_tile, slots_of
from ramify.gpu.kernels.overlap import launch_options
from ramify.gpu.kernels.walk import LOG2_OF_E

OWN_FIELDS = gl.constexpr(work_list.OWN_FIELDS)
ROW, START, END, PART = map(gl.constexpr, range(work_list.OWN_FIELDS))
NUM_ITEMS, FIRST_ITEM = map(gl.constexpr, range(2))
LN_2 = gl.constexpr(0.6931471805599453)
LOG2 = gl.constexpr(LOG2_OF_E)


@gluon.jit
def _wait(OVERLAP: gl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAP:
        gdc_wait()


@gluon.jit
def _open(first_item, work, num_works, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row, first and last position of some work; of none, no position."""
    item = first_item + gl.minimum(work, gl.maximum(num_works - 1, 0)) // GROUPS * OWN_FIELDS
    end = gl.load(item + END)
    return gl.load(item + ROW), gl.load(item + START), gl.where(work < num_works, end, 0)


@gluon.jit
def _nothing(HEADS: gl.constexpr, QUERIES: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    output = gl.zeros([HEADS, QUERIES, HEAD_DIM], gl.float32, layout=LAYOUT)
    total = gl.zeros([HEADS, QUERIES], gl.float32, layout=gl.SliceLayout(2, LAYOUT))
    peak = gl.full([HEADS, QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(2, LAYOUT))
    return output, total, peak


@gluon.jit
def _merge(output, total, peak, partials, lse, source, count, real, HEADS: gl.constexpr, dim):  # type: ignore[no-untyped-def]
    """What is known of some queries, with `count` parts more, the first at `source`; loads go past the L1 cache, which
    does not see what other processors wrote."""
    for part in range(count):
        at = source + part * HEADS
        score = gl.load(lse + at, mask=real, other=0.0, cache_modifier=".cg") * LOG2
        values = gl.load(
            partials + at[:, :, None] * dim.shape[2] + dim, mask=real[:, :, None], other=0.0, cache_modifier=".cg"
        )
        new_peak = gl.maximum(peak, score)  # finite: every part has seen a position
        weight = gl.exp2(score - new_peak)
        shrink = gl.exp2(peak - new_peak)
        output = output * shrink[:, :, None] + values * weight[:, :, None]
        total = total * shrink + weight
        peak = new_peak
    return output, total, peak


@gluon.jit
def _leave(output, total, peak, partials, lse, target, real, dim):  # type: ignore[no-untyped-def]
    """Writes what a walk found as a part."""
    at = partials + target[:, :, None] * dim.shape[2] + dim
    gl.store(at, output / total[:, :, None], mask=real[:, :, None])
    gl.store(lse + target, peak * LN_2 + gl.log(total), mask=real)


@gluon.jit
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
    rows,
    query_stride,
    table_stride,
    out_stride,
    scale,
    KV_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES_PER_ROW: gl.constexpr,
    PADDED_QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MERGES: gl.constexpr,
    SHARED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    warps: gl.constexpr = gl.num_warps()
    number: gl.constexpr = kv.dtype.element_ty
    groups: gl.constexpr = KV_HEADS // HEADS
    all_heads: gl.constexpr = KV_HEADS * QUERIES_PER_ROW
    keys_to_values: gl.constexpr = KV_HEADS * HEAD_DIM
    # Sixteen bytes a thread; a warp copies neighbouring heads of a position, warps take positions.
    lanes: gl.constexpr = HEAD_DIM // 8
    together: gl.constexpr = HEADS if HEADS * lanes < 32 else 32 // lanes
    copied: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [together, 32 // lanes // together, lanes], [1, warps, 1], [2, 0, 1]
    )
    warps_of_heads: gl.constexpr = HEADS if warps > HEADS else warps
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps_of_heads, 1, warps // warps_of_heads], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    vector: gl.constexpr = gl.SliceLayout(2, product)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    keys = gl.allocate_shared_memory(number, [STAGES, HEADS, TILE, HEAD_DIM], swizzled)
    values = gl.allocate_shared_memory(number, [STAGES, HEADS, TILE, HEAD_DIM], swizzled)

    num_works = gl.load(count + NUM_ITEMS) * groups
    first_item = items + gl.load(count + FIRST_ITEM)
    head_of_copy = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, copied)))
    dim_of_copy = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, copied)))
    source = kv + (head_of_copy * HEAD_DIM)[:, None, None] + dim_of_copy[None, None, :]
    head_of_left = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    query_of_left = gl.arange(0, PADDED_QUERIES, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    dim_of_left = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    of_left = (head_of_left[:, None] * QUERIES_PER_ROW + query_of_left[None, :])[:, :, None] * HEAD_DIM + dim_of_left[
        None, None, :
    ]
    asked = (query_of_left < QUERIES_PER_ROW)[None, :, None]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, vector))
    query = gl.arange(0, PADDED_QUERIES, layout=gl.SliceLayout(0, vector))
    of_group = head[:, None] * QUERIES_PER_ROW + query[None, :]
    real = (head[:, None] >= 0) & (query < QUERIES_PER_ROW)[None, :]
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, product)))[None, None, :]
    offset = gl.arange(0, TILE, layout=gl.SliceLayout(0, gl.SliceLayout(1, product)))

    # What is copied next: the tile at `ahead` of `coming`, whose slots are known; no tile where there is no such work.
    coming = gl.program_id(0)
    row_ahead, ahead, end_ahead = _open(first_item, coming, num_works, groups)
    table = tables + row_ahead.to(gl.int64) * table_stride
    slots = slots_of(table, ahead, end_ahead, BLOCK_SIZE, TILE, copied)
    if OVERLAP and not SHARED:
        for tile in gl.static_range(STAGES - 1):
            prefetch_tile(
                kv,
                table,
                ahead + tile * TILE,
                end_ahead,
                coming % groups * HEADS,
                KV_HEADS,
                HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                TILE,
            )
    _wait(OVERLAP and not SHARED)
    filled = 0
    for _ in gl.static_range(STAGES - 1):
        copy_tile(
            keys.index(filled),
            values.index(filled),
            slots,
            source + coming % groups * (HEADS * HEAD_DIM),
            keys_to_values,
        )
        filled += 1
        ahead += TILE
        if ahead >= end_ahead:
            coming += gl.num_programs(0)
            row_ahead, ahead, end_ahead = _open(first_item, coming, num_works, groups)
            table = tables + row_ahead.to(gl.int64) * table_stride
        slots = slots_of(table, ahead, end_ahead, BLOCK_SIZE, TILE, copied)

    stage = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        item = first_item + (work // groups) * OWN_FIELDS
        row = gl.load(item + ROW).to(gl.int64)
        start = gl.load(item + START)
        end = gl.load(item + END)
        part = gl.load(item + PART).to(gl.int64)
        first_head = work % groups * (HEADS * QUERIES_PER_ROW)
        asking = gl.load(
            queries + row * query_stride + first_head * HEAD_DIM + of_left,
            mask=asked,
            other=0.0,
            cache_modifier=".cg",  # past the L1 cache, as where kernels overlap it may hold an earlier layer's
        )
        output, total, peak = _nothing(HEADS, PADDED_QUERIES, HEAD_DIM, product)
        for at in range(start, end, TILE):
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            copy_tile(
                keys.index(filled),
                values.index(filled),
                slots,
                source + coming % groups * (HEADS * HEAD_DIM),
                keys_to_values,
            )
            filled = gl.where(filled == STAGES - 1, 0, filled + 1)
            ahead += TILE
            if ahead >= end_ahead:
                coming += gl.num_programs(0)
                row_ahead, ahead, end_ahead = _open(first_item, coming, num_works, groups)
                table = tables + row_ahead.to(gl.int64) * table_stride
            slots = slots_of(table, ahead, end_ahead, BLOCK_SIZE, TILE, copied)
            unscored = gl.zeros([HEADS, PADDED_QUERIES, TILE], gl.float32, layout=product)
            scores = mma_v2(asking, keys.index(stage).permute((0, 2, 1)).load(right), unscored) * scale
            scores = gl.where((at + offset < end)[None, None, :], scores, float("-inf"))
            new_peak = gl.maximum(peak, gl.max(scores, 2))
            weights = gl.exp2(scores - new_peak[:, :, None])
            shrink = gl.exp2(peak - new_peak)
            total = total * shrink + gl.sum(weights, 2)
            weights = gl.convert_layout(weights.to(number), left)
            output = mma_v2(weights, values.index(stage).load(right), output * shrink[:, :, None])
            peak = new_peak
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)

        row_out = out + row * out_stride + (first_head + of_group)[:, :, None] * HEAD_DIM + dim
        if MERGES:
            of_row = gl.load(num_parts + row)
            shared = 0
            if SHARED:
                shared = gl.load(shared_parts + row)
            first = gl.load(first_part + row).to(gl.int64) * all_heads + first_head + of_group
            # What needs no other part than shared ones stays in registers.
            if of_row - shared == 1:
                _wait(OVERLAP and SHARED)
                output, total, peak = _merge(output, total, peak, partials, lse, first, shared, real, all_heads, dim)
                gl.store(row_out, (output / total[:, :, None]).to(out.dtype.element_ty), mask=real[:, :, None])
            else:
                _leave(output, total, peak, partials, lse, part * all_heads + first_head + of_group, real, dim)
                gl.thread_barrier()  # all of this program's part is written before it is counted
                before = gl.atomic_add(arrived + row * KV_HEADS + work % groups, 1, sem="acq_rel")
                if before == of_row - shared - 1:
                    _wait(OVERLAP and SHARED)
                    output, total, peak = _nothing(HEADS, PADDED_QUERIES, HEAD_DIM, product)
                    output, total, peak = _merge(
                        output, total, peak, partials, lse, first, of_row, real, all_heads, dim
                    )
                    gl.store(row_out, (output / total[:, :, None]).to(out.dtype.element_ty), mask=real[:, :, None])
                    gl.store(arrived + row * KV_HEADS + work % groups, 0)
        else:
            _leave(output, total, peak, partials, lse, part * all_heads + first_head + of_group, real, dim)
    async_copy.wait_group(0)
    _wait(OVERLAP and SHARED)
    if MERGES:
        for other in range(gl.program_id(0), rows, gl.num_programs(0)):
            shared = 0
            if SHARED:
                shared = gl.load(shared_parts + other)
            if gl.load(num_parts + other) == shared:  # padding, or a row that shares all of its positions
                first = gl.load(first_part + other).to(gl.int64) * all_heads
                for group in range(groups):
                    own = group * (HEADS * QUERIES_PER_ROW) + of_group
                    output, total, peak = _nothing(HEADS, PADDED_QUERIES, HEAD_DIM, product)
                    output, total, peak = _merge(
                        output, total, peak, partials, lse, first + own, shared, real, all_heads, dim
                    )
                    output = output / gl.where(total == 0, 1.0, total)[:, :, None]
                    row_out = out + gl.cast(other, gl.int64) * out_stride + own[:, :, None] * HEAD_DIM + dim
                    gl.store(row_out, output.to(out.dtype.element_ty), mask=real[:, :, None])


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """What a program has on its way: `stages` tiles of so many key-value heads and positions, powers of two."""

    heads: int
    positions: int
    stages: int
    warps: int

    def shared_memory(self, head_dim: int, itemsize: int) -> int:
        """Bytes, with what a sum over warps may take."""
        return 2 * self.stages * self.heads * self.positions * head_dim * itemsize + SCRATCH


SCRATCH = 8 * 1024
HEAD_DIMS = (64, 128)
FEWEST_QUERIES = 16  # what a matrix instruction takes
# As timed on an H200 (docs/log.md). A head has a warp of its own; half of the shared memory is on its way.
HEADS, STAGES, TILE_BYTES = 4, 3, 32 * 1024
TOGETHER = 8  # key-value heads, or a multiple: of fewer, what lies together is short anyway
FEWEST_PAIRS = 1024  # rows times key-value heads: fewer leave processors without work
TURNS = 2  # programs that a launch has for every one that runs at a time: long rows and short ones even out


def tiles_for(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> BlockTiles | None:
    """None where this kernel was not made for the chip or the shape."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    fits = dtype.itemsize == 2 and head_dim in HEAD_DIMS and heads // kv_heads <= FEWEST_QUERIES
    return shape_of_tiles(head_dim) if is_hopper and fits and kv_heads % TOGETHER == 0 else None


def shape_of_tiles(head_dim: int) -> BlockTiles:
    return BlockTiles(HEADS, TILE_BYTES // (4 * HEADS * head_dim), STAGES, HEADS)


def block_decode(
    task: AttentionTask, merging: Merging | None, *, num_programs: int, tiles: BlockTiles, overlap: bool = False
) -> None:
    """As decode_attention.decode_attention."""
    lists, out_stride, constants = merged_into(task, merging)
    _decode[(num_programs,)](
        *task.read,
        *task.parts,
        *lists,
        task.queries.shape[0],
        *task.strides,
        out_stride,
        task.scale,
        **task.shape,
        **constants,
        HEADS=tiles.heads,
        PADDED_QUERIES=FEWEST_QUERIES,
        TILE=tiles.positions,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **launch_options(overlap),
    )
