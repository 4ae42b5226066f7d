"""Many rows times a weight of few bits: tiles are unpacked while the matrix units multiply the last ones.

    matrix units   outputs (128, rows) += weights of columns k (128, 128) @ rows of columns k
    threads        weights of columns k + 1: unpacked, rounded to the rows' precision, written to shared memory
    copies         rows of columns k + 1

A weight is rounded once, to what a model that is dequantised in that precision holds. Written out first it would be
written to memory and read again. Gluon, for Hopper's matrix units: a warp unpacks a tile of packed_parts.py at a time,
16 outputs by 128 columns.
"""

# ruff: noqa: RUF005 - the compiler knows no starred tuples

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.packed_words import ask, can_multiply, scale_of, scaled, stacked, texts_of, unpacked
from ramify.gpu.packed_parts import COLUMNS, PackedPart

OUTPUTS = 128  # of a program
WARPS = 8


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """rows: of a program, a power of two from 64 to 256; splits: of the columns."""

    rows: int
    splits: int = 1


def can_multiply_tiles(dtype: torch.dtype, part: PackedPart) -> bool:
    """Whether these are the matrix units and the sizes that this kernel is written for."""
    is_hopper = can_multiply(dtype, part) and torch.cuda.get_device_capability(part.numbers.device)[0] == 9
    return is_hopper and not part.shape[1] % COLUMNS


def packed_tiles(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    blocks: RowBlocks,
    *,
    first_output: int = 0,
    bias: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """x (rows, columns) in the order of the part's columns -> out (splits, rows, all outputs), from first_output on.

    Several splits are float32, and whoever reads them adds them up. One may be of any precision, and have the bias
    (outputs,) in it already.
    """
    assert out.shape[0] == blocks.splits, "one part a split"
    assert blocks.splits == 1 or bias is None, "parts are added up by their reader"
    _launch(x, part, out, blocks, part.shape[0], first_output, bias, is_paired=False, overlap=overlap)


def packed_gate_up_tiles(
    x: Tensor, part: PackedPart, out: Tensor, blocks: RowBlocks, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """x (rows, columns), a part of gate and up, gate first -> out (rows, inner): silu(gate) * up."""
    assert part.shape[0] == 2 * out.shape[1], "gate and up are of one size"
    assert blocks.splits == 1, "silu needs the whole sum"
    _launch(x, part, out[None], blocks, out.shape[1], 0, bias, is_paired=True, overlap=overlap)


def _launch(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    blocks: RowBlocks,
    outputs: int,
    first_output: int,
    bias: Tensor | None,
    *,
    is_paired: bool,
    overlap: bool,
) -> None:
    (rows, columns), texts = x.shape, texts_of(part, x.dtype)
    assert columns == part.shape[1], "x has the weight's columns"
    assert x.is_contiguous(), "rows of x lie one after the other"
    assert out.is_contiguous(), "and those of the product"
    row_tiles = triton.cdiv(rows, blocks.rows)
    own = OUTPUTS // 2 if is_paired else OUTPUTS
    _packed_tiles[(triton.cdiv(outputs, own) * row_tiles, blocks.splits)](
        x,
        part.numbers,
        part.scales,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        out.shape[2],
        first_output,
        row_tiles,
        COLUMNS=columns,
        SPLITS=blocks.splits,
        ROWS=blocks.rows,
        BITS=part.bits,
        IS_FLOAT=part.is_float,
        BLOCKS=part.blocks,
        HAS_BIAS=bias is not None,
        PAIRED=is_paired,
        UNIT=texts.unit,
        UNPACK=texts.unpack,
        SCALE=texts.scale,
        ROUND=texts.round,
        num_warps=WARPS,
        **launch_options(overlap),
    )


@gluon.jit
def _weights_of(  # type: ignore[no-untyped-def]
    words,
    HALF: gl.constexpr,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    UNIT: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    ROUND: gl.constexpr,
):
    """64 columns of every warp's tile, two numbers a word: int32 (outputs, 32)."""
    WARPS: gl.constexpr = gl.num_warps()
    rounded = ()
    for unit in gl.static_range(2):
        scale, zero = scale_of(words, 2 * BITS + (2 * HALF + unit) * BLOCKS // 4 * 2, IS_FLOAT, SCALE)
        other_scale, other_zero = scale_of(words, 2 * BITS + (2 * HALF + unit) * BLOCKS // 4 * 2 + 1, IS_FLOAT, SCALE)
        first = unpacked(words, 0, 4 * HALF + 2 * unit, zero, other_zero, BITS, UNPACK)
        last = unpacked(words, 0, 4 * HALF + 2 * unit + 1, zero, other_zero, BITS, UNPACK)
        rounded = rounded + (
            scaled(first[0], scale * UNIT, ROUND),
            scaled(first[2], scale * UNIT, ROUND),
            scaled(last[0], scale * UNIT, ROUND),
            scaled(last[2], scale * UNIT, ROUND),
            scaled(first[1], other_scale * UNIT, ROUND),
            scaled(first[3], other_scale * UNIT, ROUND),
            scaled(last[1], other_scale * UNIT, ROUND),
            scaled(last[3], other_scale * UNIT, ROUND),
        )
    # Of the bits of a word's place: r, s, p, u of packed_parts.py.
    held = stacked(rounded, 16).reshape([WARPS, 8, 4, 2, 2, 2, 2])
    return held.permute((0, 5, 1, 6, 2, 4, 3)).reshape([16 * WARPS, 32])


@gluon.jit
def _packed_tiles(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x,
    numbers,
    scales,
    bias,
    out,
    rows,
    outputs,
    all_outputs,
    first_output,
    row_tiles,
    COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PAIRED: gl.constexpr,
    UNIT: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    ROUND: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    start_next(OVERLAP)
    WARPS: gl.constexpr = gl.num_warps()
    OUTPUTS: gl.constexpr = 16 * WARPS
    CHUNKS: gl.constexpr = BITS // 2
    GROUPS: gl.constexpr = COLUMNS // 128
    PER_SPLIT: gl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    dtype: gl.constexpr = x.dtype.element_ty
    # Programs of the same outputs follow each other: the second reads the weights from the cache.
    block = gl.program_id(0) // row_tiles
    first_row = gl.program_id(0) % row_tiles * ROWS
    split = gl.program_id(1)
    first_group = split * PER_SPLIT
    end = gl.minimum(first_group + PER_SPLIT, GROUPS)

    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    lane = thread % 32
    num_tiles = (outputs + 15) // 16
    if PAIRED:  # gate by the first half of the warps, up by the second
        tile = gl.minimum(block * (WARPS // 2) + thread // 32 % (WARPS // 2), num_tiles - 1)
        tile = (tile + thread // (16 * WARPS) * num_tiles).to(gl.int64)
    else:
        tile = gl.minimum(block * WARPS + thread // 32, num_tiles - 1).to(gl.int64)
    tile_numbers = (numbers + tile * GROUPS * (CHUNKS * 128) + lane * 4,)
    tile_scales = (scales + tile * GROUPS * (BLOCKS * 16) + lane // 4 * 2,)
    words = ask(tile_numbers, tile_scales, first_group, end, True, 1, CHUNKS, BLOCKS)

    # Of the weights two tiles of 64 columns are in use and two are being made. Of the rows more are on their way where
    # shared memory has room; two programs of 64 rows fit on a processor.
    STAGES: gl.constexpr = 3 if ROWS == 128 else 2
    weights = gl.allocate_shared_memory(dtype, [4, OUTPUTS, 64], gl.NVMMASharedLayout(128, 16, 2))
    weight_words = weights._reinterpret(gl.int32, [4, OUTPUTS, 32], gl.NVMMASharedLayout(128, 32, 2))
    inputs = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, 64], gl.NVMMASharedLayout(128, 16, 2))
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.minimum(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied)), rows - 1)
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(0, copied))
    source = x + (row.to(gl.int64) * COLUMNS)[:, None] + lanes[None, :]
    for half in gl.static_range(2):
        made = _weights_of(words, half, BITS, IS_FLOAT, BLOCKS, UNIT, UNPACK, SCALE, ROUND)
        weight_words.index(half).store(made)
    # Asked for two turns ahead: a turn is shorter than the way from memory.
    words = ask(tile_numbers, tile_scales, first_group + 1, end, True, 1, CHUNKS, BLOCKS)
    later = ask(tile_numbers, tile_scales, first_group + 2, end, True, 1, CHUNKS, BLOCKS)
    wait_for_last(OVERLAP)
    for stage in gl.static_range(STAGES - 1):
        column = gl.minimum(first_group + stage, GROUPS - 1) * 128
        for half in gl.static_range(2):
            async_copy.async_copy_global_to_shared(inputs.index(2 * stage + half), source + column + half * 64)
        async_copy.commit_group()

    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    sums = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=summed)
    for group in range(first_group, end):
        now = (group - first_group) % 2 * 2
        own = (group - first_group) % STAGES * 2
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # what a thread wrote the matrix units see after its fence, and after all threads' fences
        gl.thread_barrier()
        first = warpgroup_mma(weights.index(now), inputs.index(own).permute((1, 0)), sums, is_async=True)
        last = warpgroup_mma(weights.index(now + 1), inputs.index(own + 1).permute((1, 0)), first, is_async=True)
        column = gl.minimum(group + STAGES - 1, GROUPS - 1) * 128
        free = (group - first_group + STAGES - 1) % STAGES * 2
        for half in gl.static_range(2):
            async_copy.async_copy_global_to_shared(inputs.index(free + half), source + column + half * 64)
        async_copy.commit_group()
        for half in gl.static_range(2):
            made = _weights_of(words, half, BITS, IS_FLOAT, BLOCKS, UNIT, UNPACK, SCALE, ROUND)
            weight_words.index(2 - now + half).store(made)
        words = later
        later = ask(tile_numbers, tile_scales, group + 3, end, True, 1, CHUNKS, BLOCKS)
        sums = warpgroup_mma_wait(0, deps=[last])
    async_copy.wait_group(0)

    number: gl.constexpr = out.dtype.element_ty
    OWN: gl.constexpr = OUTPUTS // 2 if PAIRED else OUTPUTS
    if HAS_BIAS:
        place = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, summed))
        output = gl.minimum(block * OWN + place % OWN, outputs - 1) + place // OWN * outputs
        sums += gl.load(bias + output).to(gl.float32)[:, None]
    both: gl.constexpr = gl.BlockedLayout([8, 1, 2], [8, 4, 1], [1, WARPS, 1], [2, 0, 1])
    plain: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    written: gl.constexpr = gl.SliceLayout(2, both) if PAIRED else plain
    if PAIRED:
        pairs = sums.to(number).reshape([2, OWN, ROWS]).permute((1, 2, 0))
        gate, up = gl.split(gl.convert_layout(pairs, both))
        # Rounded where torch's own operators round.
        wide = gate.to(gl.float32)
        values = ((wide / (1.0 + gl.exp(-wide))).to(number).to(gl.float32) * up.to(gl.float32)).to(number)
    else:
        values = sums.to(number)
    values = gl.convert_layout(values, written)
    output = block * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, written))
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, written))
    target = out + ((split * rows + row).to(gl.int64) * all_outputs + first_output)[None, :] + output[:, None]
    gl.store(target, values, mask=(output < outputs)[:, None] & (row < rows)[None, :])
