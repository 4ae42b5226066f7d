"""Shared-prefix attention with roles: what hopper_prefix.py does, by warps that copy and warps that compute.

    four warps copy        keys and values of tile t + 1, t + 2, ... into a ring, as soon as a place is free
    four warps compute     64 queries:  scores of tile t + 1 | output += weights of tile t @ values | softmax
    four more              the next 64 queries, over the same tiles

A tile is read once for 128 queries instead of 64: where many rows share a prefix, it is the second cache that programs
wait for. Those that compute work out no addresses and wait for no one but the copies, so that one's products run while
the other's weights are made. An item is up to twice QUERIES queries; of QUERIES or fewer, the second four only let
tiles pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramify.gpu.kernels.attention_task import AttentionTask, Sharing
from ramify.gpu.kernels.hopper_prefix import (
    END,
    FIRST_ITEM,
    FIRST_QUERY,
    FIRST_SHARER,
    LN_2,
    NUM_ITEMS,
    NUM_QUERIES,
    PREFIX,
    PREFIX_FIELDS,
    SHARING_FIELDS,
    SPLIT,
    START,
    TABLE_ROW,
    _copy,
    _slots,
    _weigh,
)
from ramify.gpu.kernels.overlap import launch_options

QUERIES = gl.constexpr(64)  # of four warps that compute
COMPUTING = gl.constexpr(2)  # such fours
COPYING_THREADS = gl.constexpr(128)


@gluon.jit
def _queries(item, first_sharer, WHICH: gl.constexpr, QUERIES_PER_ROW: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """As in hopper_prefix.py, of one four of warps."""
    index = WHICH * QUERIES + gl.arange(0, QUERIES, layout=LAYOUT)
    query = gl.load(item + FIRST_QUERY) + index
    inside = index < gl.load(item + NUM_QUERIES)
    row = gl.load(first_sharer + query // QUERIES_PER_ROW, mask=inside, other=0).to(gl.int64)
    return row, query % QUERIES_PER_ROW, inside


@gluon.jit
def _copying(  # type: ignore[no-untyped-def]
    kv,
    tables,
    count,
    items,
    prefixes,
    table_stride,
    keys,
    values,
    keys_full,
    keys_free,
    values_full,
    values_free,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    keys_to_values: gl.constexpr = KV_HEADS * HEAD_DIM
    slot_stride: gl.constexpr = 2 * keys_to_values
    num_items = gl.load(count + NUM_ITEMS)
    first_item = items + gl.load(count + FIRST_ITEM)
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copied))
    stage, turn = 0, 0
    for work in range(gl.program_id(0), num_items * KV_HEADS, gl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * PREFIX_FIELDS
        prefix = prefixes + gl.load(item + PREFIX) * SHARING_FIELDS
        start = gl.load(item + START)
        last = gl.load(item + END) - 1
        table = tables + gl.load(prefix + TABLE_ROW).to(gl.int64) * table_stride
        head_keys = (kv + work % KV_HEADS * HEAD_DIM + dim)[None, :]
        num_tiles = (last - start) // BLOCK_N + 1
        at = start + (num_tiles - 1) * BLOCK_N
        slots = _slots(table, at, start, last, BLOCK_SIZE, BLOCK_N, copied)
        for _ in range(num_tiles):
            at -= BLOCK_N
            next_slots = _slots(table, at, start, last, BLOCK_SIZE, BLOCK_N, copied)
            mbarrier.wait(keys_free.index(stage), turn ^ 1)
            _copy(keys.index(stage), head_keys, slots, slot_stride)
            async_copy.mbarrier_arrive(keys_full.index(stage), increment_count=False)
            mbarrier.wait(values_free.index(stage), turn ^ 1)
            _copy(values.index(stage), head_keys + keys_to_values, slots, slot_stride)
            async_copy.mbarrier_arrive(values_full.index(stage), increment_count=False)
            slots = next_slots
            is_last = stage == STAGES - 1
            stage = gl.where(is_last, 0, stage + 1)
            turn = gl.where(is_last, turn ^ 1, turn)
    async_copy.wait_group(0)


@gluon.jit
def _computing(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    queries,
    count,
    items,
    prefixes,
    sharers,
    first_part,
    partials,
    lse,
    query_stride,
    scale,
    asked,
    keys,
    values,
    keys_full,
    keys_free,
    values_full,
    values_free,
    WHICH: gl.constexpr,
    KV_HEADS: gl.constexpr,
    QUERIES_PER_ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    number: gl.constexpr = keys.dtype
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    attended: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weighed: gl.constexpr = gl.DotOperandLayout(0, attended, 2)
    num_items = gl.load(count + NUM_ITEMS)
    first_item = items + gl.load(count + FIRST_ITEM)
    dim_of_query = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, loaded))
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    stage, turn = 0, 0
    for work in range(gl.program_id(0), num_items * KV_HEADS, gl.num_programs(0)):
        item = first_item + (work // KV_HEADS) * PREFIX_FIELDS
        start = gl.load(item + START)
        last = gl.load(item + END) - 1
        num_tiles = (last - start) // BLOCK_N + 1
        if gl.load(item + NUM_QUERIES) > WHICH * QUERIES:
            first_sharer = sharers + gl.load(prefixes + gl.load(item + PREFIX) * SHARING_FIELDS + FIRST_SHARER)
            first_head = work % KV_HEADS * QUERIES_PER_ROW
            row, head, inside = _queries(item, first_sharer, WHICH, QUERIES_PER_ROW, gl.SliceLayout(1, loaded))
            source = queries + row[:, None] * query_stride + ((first_head + head) * HEAD_DIM)[:, None]
            mine = asked.index(WHICH)
            mine.store(gl.load(source + dim_of_query[None, :], mask=inside[:, None], other=0.0))
            held = mine.load(gl.DotOperandLayout(0, scored, 2))

            nothing = gl.zeros([QUERIES, BLOCK_N], gl.float32, layout=scored)
            mbarrier.wait(keys_full.index(stage), turn)
            scores = warpgroup_mma(held, keys.index(stage).permute((1, 0)), nothing, use_acc=False)
            mbarrier.arrive(keys_free.index(stage))
            position = start + (num_tiles - 1) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scored))
            scores = gl.where((position <= last)[None, :], scores, float("-inf"))
            peak = gl.full([QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scored))
            total = gl.zeros([QUERIES], gl.float32, layout=gl.SliceLayout(1, scored))
            weights, _, peak, total = _weigh(scores, peak, total, scale, number, weighed)
            output = gl.zeros([QUERIES, HEAD_DIM], gl.float32, layout=attended)
            for _ in range(1, num_tiles):
                is_last = stage == STAGES - 1
                next_stage = gl.where(is_last, 0, stage + 1)
                next_turn = gl.where(is_last, turn ^ 1, turn)
                mbarrier.wait(keys_full.index(next_stage), next_turn)
                new_scores = warpgroup_mma(
                    held, keys.index(next_stage).permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                mbarrier.wait(values_full.index(stage), turn)
                new_output = warpgroup_mma(weights, values.index(stage), output, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[new_scores])
                mbarrier.arrive(keys_free.index(next_stage))
                new_weights, shrink, peak, total = _weigh(scores, peak, total, scale, number, weighed)
                output, weights = warpgroup_mma_wait(0, deps=[new_output, weights])
                mbarrier.arrive(values_free.index(stage))
                output = output * gl.convert_layout(shrink, gl.SliceLayout(1, attended))[:, None]
                weights = new_weights
                stage, turn = next_stage, next_turn
            mbarrier.wait(values_full.index(stage), turn)
            output = warpgroup_mma(weights, values.index(stage), output)
            mbarrier.arrive(values_free.index(stage))
            is_last = stage == STAGES - 1
            stage = gl.where(is_last, 0, stage + 1)
            turn = gl.where(is_last, turn ^ 1, turn)

            total = gl.convert_layout(total, gl.SliceLayout(1, attended))
            score = gl.convert_layout(peak, gl.SliceLayout(1, attended)) * LN_2 + gl.log(total)
            row, head, inside = _queries(item, first_sharer, WHICH, QUERIES_PER_ROW, gl.SliceLayout(1, attended))
            part = gl.load(first_part + row, mask=inside, other=0).to(gl.int64) + gl.load(item + SPLIT)
            target = part * (KV_HEADS * QUERIES_PER_ROW) + first_head + head
            dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, attended))
            gl.store(
                partials + target[:, None] * HEAD_DIM + dim[None, :], output / total[:, None], mask=inside[:, None]
            )
            gl.store(lse + target, score, mask=inside)
        else:
            for _ in range(num_tiles):
                mbarrier.wait(keys_full.index(stage), turn)
                mbarrier.arrive(keys_free.index(stage))
                mbarrier.wait(values_full.index(stage), turn)
                mbarrier.arrive(values_free.index(stage))
                is_last = stage == STAGES - 1
                stage = gl.where(is_last, 0, stage + 1)
                turn = gl.where(is_last, turn ^ 1, turn)


@gluon.jit
def divided_prefix(  # type: ignore[no-untyped-def]
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
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr,
    COPYING_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    number: gl.constexpr = kv.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    asked = gl.allocate_shared_memory(number, [COMPUTING, QUERIES, HEAD_DIM], shared)
    keys = gl.allocate_shared_memory(number, [STAGES, BLOCK_N, HEAD_DIM], shared)
    values = gl.allocate_shared_memory(number, [STAGES, BLOCK_N, HEAD_DIM], shared)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=COPYING_THREADS)
        mbarrier.init(keys_free.index(stage), count=COMPUTING)
        mbarrier.init(values_full.index(stage), count=COPYING_THREADS)
        mbarrier.init(values_free.index(stage), count=COMPUTING)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _computing,
                (
                    queries, count, items, prefixes, sharers, first_part, partials, lse, query_stride, scale,
                    asked, keys, values, keys_full, keys_free, values_full, values_free,
                    first, KV_HEADS, QUERIES_PER_ROW, HEAD_DIM, BLOCK_N, STAGES, OVERLAP,
                ),
            ),
            (
                _computing,
                (
                    queries, count, items, prefixes, sharers, first_part, partials, lse, query_stride, scale,
                    asked, keys, values, keys_full, keys_free, values_full, values_free,
                    second, KV_HEADS, QUERIES_PER_ROW, HEAD_DIM, BLOCK_N, STAGES, OVERLAP,
                ),
            ),
            (
                _copying,
                (
                    kv, tables, count, items, prefixes, table_stride,
                    keys, values, keys_full, keys_free, values_full, values_free,
                    KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [COMPUTING_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roles:
    """Positions of a tile, places in the ring, and registers of a thread: at the launch, when it has more to do, and
    where it copies. Twelve warps have 168 each, or fewer where a small program of another kernel shall fit beside."""

    positions: int
    stages: int
    registers: int
    computing: int
    copying: int


ALONE = Roles(64, 4, 168, 224, 56)
BESIDE_OTHERS = Roles(64, 4, 136, 184, 40)
BLOCK_M = 128
WARPS = 4  # of each role


def divided(
    task: AttentionTask, sharing: Sharing, *, num_programs: int, roles: Roles = ALONE, overlap: bool = False
) -> None:
    """For Hopper's matrix units (hopper_prefix.can_schedule)."""
    divided_prefix[(num_programs,)](
        *task.read,
        *sharing,
        *task.parts,
        *task.strides,
        task.scale,
        **task.shape,
        BLOCK_N=roles.positions,
        STAGES=roles.stages,
        COMPUTING_REGISTERS=roles.computing,
        COPYING_REGISTERS=roles.copying,
        num_warps=WARPS,
        maxnreg=roles.registers,
        **launch_options(overlap),
    )
