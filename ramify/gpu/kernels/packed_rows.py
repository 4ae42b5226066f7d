"""Up to a few dozen rows times a weight of few bits, bound by reading the weight.

    numbers      in memory as threads hold them (packed_parts.py): a load of 16 bytes a thread, and nothing is moved
    products     by matrix instructions that are fed from registers (packed_sums.py)

A program takes some tiles of 16 outputs. Its warps share out the columns, 128 at a time, and add their sums up in
shared memory at the end. Weights are asked for some turns ahead, the first ones before the preceding kernel has ended.
Around the product it does what `row_product` does: the norm of one row before it, after it a bias, the residual or
silu(gate) * up.
"""

# ruff: noqa: RUF005 - the compiler knows no starred tuples

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.packed_sums import (
    NORM_TEXTS,
    PRODUCT_TEXT,
    add,
    load_input_pair,
    normed,
    own,
    read,
    spread,
)
from ramify.gpu.kernels.packed_words import ask, load_pair, stacked, texts_of
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.packed_parts import OUTPUTS, PackedPart

MOST_TURNS = 8
ROWS = 8  # of a matrix instruction
MOST_ROWS = 32  # of a program


@dataclass(frozen=True, slots=True)
class WarpTiles:
    """tiles: of 16 outputs, of a program; of gate and up, half are of each. stages: turns asked for ahead."""

    tiles: int
    warps: int
    stages: int
    splits: int = 1


def packed_rows(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: WarpTiles,
    *,
    first_output: int = 0,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    adds: bool = False,
    overlap: bool = False,
) -> None:
    """x (rows, columns) in the order of the part's columns -> out (splits, rows, all outputs), from first_output on.

    Several splits are float32, and whoever reads them adds them up. One may be of any precision, and have the bias
    (outputs,) in it already; adds: onto what is there. A norm is that of one row.
    """
    assert out.shape[0] == tiles.splits, "one part a split"
    assert tiles.splits == 1 or (bias is None and not adds), "parts are added up by their reader"
    _launch(x, part, out, tiles, part.shape[0], first_output, bias, norm, adds=adds, is_paired=False, overlap=overlap)


def packed_gate_up(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: WarpTiles,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    overlap: bool = False,
) -> None:
    """x (rows, columns), a part of gate and up, gate first -> out (rows, inner): silu(gate) * up."""
    assert part.shape[0] == 2 * out.shape[1], "gate and up are of one size"
    assert tiles.splits == 1, "silu needs the whole sum"
    _launch(x, part, out[None], tiles, out.shape[1], 0, bias, norm, adds=False, is_paired=True, overlap=overlap)


def _launch(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: WarpTiles,
    outputs: int,
    first_output: int,
    bias: Tensor | None,
    norm: Norm | None,
    *,
    adds: bool,
    is_paired: bool,
    overlap: bool,
) -> None:
    (rows, columns), texts = x.shape, texts_of(part, x.dtype)
    assert columns == part.shape[1], "x has the weight's columns"
    assert x.is_contiguous(), "rows of x lie one after the other"
    assert out.is_contiguous(), "and those of the product"
    assert norm is None or rows == 1, "a norm is that of one row"
    row_tiles = min(MOST_ROWS // ROWS, triton.next_power_of_2(triton.cdiv(rows, ROWS)))
    own_tiles = tiles.tiles // 2 if is_paired else tiles.tiles
    per_split = triton.cdiv(part.numbers.shape[1], tiles.splits)
    turns = triton.cdiv(per_split, tiles.warps)
    turns = triton.cdiv(turns, triton.cdiv(turns, MOST_TURNS))
    grid = (triton.cdiv(triton.cdiv(outputs, OUTPUTS), own_tiles), triton.cdiv(rows, row_tiles * ROWS), tiles.splits)
    _packed_rows[grid](
        x,
        part.numbers,
        part.scales,
        x if bias is None else bias,
        x if norm is None else norm.weight,
        out,
        rows,
        outputs,
        out.shape[2],
        first_output,
        0.0 if norm is None else norm.eps,
        COLUMNS=columns,
        TURNS=turns,
        STAGES=min(tiles.stages, turns),
        SPLITS=tiles.splits,
        BITS=part.bits,
        IS_FLOAT=part.is_float,
        BLOCKS=part.blocks,
        TILES=tiles.tiles,
        ROW_TILES=row_tiles,
        NORM_WIDTH=triton.next_power_of_2(columns),
        HAS_BIAS=bias is not None,
        ADDS=adds,
        PAIRED=is_paired,
        UNIT=texts.unit,
        UNPACK=texts.unpack,
        SCALE=texts.scale,
        NORM="" if norm is None else NORM_TEXTS[x.dtype],
        PRODUCT=PRODUCT_TEXT.format(number={torch.bfloat16: "bf16", torch.float16: "f16"}[x.dtype]),
        num_warps=tiles.warps,
        **launch_options(overlap),
    )


@triton.constexpr_function
def _by_parts(rank):  # type: ignore[no-untyped-def]
    """Threads of a part lie one after the other, then the next part."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank)))


@gluon.jit
def _packed_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x,
    numbers,
    scales,
    bias,
    norm_weight,
    out,
    rows,
    outputs,
    all_outputs,
    first_output,
    eps,
    COLUMNS: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    NORM_WIDTH: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ADDS: gl.constexpr,
    PAIRED: gl.constexpr,
    UNIT: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    NORM: gl.constexpr,
    PRODUCT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    start_next(OVERLAP)
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    CHUNKS: gl.constexpr = BITS // 2
    GROUPS: gl.constexpr = (COLUMNS + 127) // 128
    PER_SPLIT: gl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    LAPS: gl.constexpr = (PER_SPLIT + WARPS * TURNS - 1) // (WARPS * TURNS)
    # Whether every warp has something to do in every turn but, perhaps, the last.
    EVEN: gl.constexpr = LAPS == 1 and GROUPS % SPLITS == 0
    WHOLE: gl.constexpr = COLUMNS % 128 == 0
    OWN: gl.constexpr = TILES // 2 if PAIRED else TILES
    PARTS: gl.constexpr = TILES * ROW_TILES * 4
    each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    thread = gl.arange(0, THREADS, layout=each)
    lane = thread % 32
    warp = thread // 32
    split = gl.program_id(2)
    first_group = split * PER_SPLIT
    end = gl.minimum(first_group + PER_SPLIT, GROUPS)
    num_tiles = (outputs + 15) // 16
    first_tile = gl.program_id(0) * OWN
    tile_numbers = ()
    tile_scales = ()
    for tile in gl.static_range(TILES):
        which = gl.minimum(first_tile + tile % OWN, num_tiles - 1)  # past the end the last one again
        if tile >= OWN:
            which += num_tiles
        start = which.to(gl.int64) * GROUPS
        tile_numbers = tile_numbers + (numbers + start * (CHUNKS * 128) + lane * 4,)
        tile_scales = tile_scales + (scales + start * (BLOCKS * 16) + lane // 4 * 2,)

    first_row = gl.program_id(1) * (ROW_TILES * 8)
    inputs = ()
    for tile in gl.static_range(ROW_TILES):
        row = gl.minimum(first_row + tile * 8 + lane // 4, rows - 1)
        inputs = inputs + (x + row.to(gl.int64) * COLUMNS + lane % 4 * 8,)

    nothing = gl.full([THREADS], 0.0, gl.float32, layout=each)
    totals = ()
    for _ in gl.static_range(PARTS):
        totals = totals + (nothing,)
    for lap in gl.static_range(LAPS):
        group = first_group + warp + lap * (TURNS * WARPS)
        stages = ()
        for turn in gl.static_range(STAGES):
            stages = stages + (
                ask(
                    tile_numbers, tile_scales, group + turn * WARPS, end,
                    not (EVEN and (turn + 1) * WARPS <= PER_SPLIT), TILES, CHUNKS, BLOCKS,
                ),
            )  # fmt: skip
        weights = ()
        if NORM != "":
            for turn in gl.static_range(TURNS):
                at = own(lane, gl.minimum(group + turn * WARPS, GROUPS - 1), COLUMNS, WHOLE)
                weights = weights + (load_pair(norm_weight + at, at, False),)
        if lap == 0:
            wait_for_last(OVERLAP)
            scale = nothing
            if NORM != "":
                wide: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
                everywhere = gl.arange(0, NORM_WIDTH, layout=wide)
                row = gl.load(x + everywhere, mask=everywhere < COLUMNS, other=0.0).to(gl.float32)
                scale = nothing + gl.rsqrt(gl.sum(row * row, axis=0) / COLUMNS + eps)
        raw = ()
        if NORM != "":
            for turn in gl.static_range(TURNS):
                at = own(lane, gl.minimum(group + turn * WARPS, GROUPS - 1), COLUMNS, WHOLE)
                raw = raw + (load_input_pair(x + at),)
        else:
            ahead = read(inputs, gl.minimum(group, GROUPS - 1) * 128, COLUMNS, ROW_TILES, WHOLE)
        for turn in gl.static_range(TURNS):
            if NORM != "":
                first = normed(raw[turn][0], weights[turn][0], scale, NORM)
                values = spread((first, normed(raw[turn][1], weights[turn][1], scale, NORM)), lane)
            else:
                values = ahead
                column = gl.minimum(group + (turn + 1) * WARPS, GROUPS - 1) * 128
                if ROW_TILES == 1 and turn + 1 < TURNS:
                    ahead = read(inputs, column, COLUMNS, ROW_TILES, WHOLE)
            totals = add(
                totals, stages[turn], values, nothing,
                BITS, IS_FLOAT, TILES, ROW_TILES, BLOCKS, UNPACK, SCALE, PRODUCT,
            )  # fmt: skip
            if NORM == "" and ROW_TILES > 1 and turn + 1 < TURNS:
                ahead = read(inputs, column, COLUMNS, ROW_TILES, WHOLE)
            if turn + STAGES < TURNS:
                stages = stages + (
                    ask(
                        tile_numbers, tile_scales, group + (turn + STAGES) * WARPS, end,
                        not (EVEN and (turn + STAGES + 1) * WARPS <= PER_SPLIT), TILES, CHUNKS, BLOCKS,
                    ),
                )  # fmt: skip

    # Of a warp's sums, part p of a thread: 16 outputs by 8 rows, 4 of them a thread.
    whole_sums = stacked(totals, PARTS)
    shared = gl.allocate_shared_memory(gl.float32, whole_sums.shape, _by_parts(len(whole_sums.shape)))
    shared.store(whole_sums)
    whole = shared._reinterpret(gl.float32, [PARTS, WARPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    OUT: gl.constexpr = OWN * ROW_TILES * 4
    summed: gl.constexpr = gl.BlockedLayout([1, WARPS, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    parts_left: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, summed))
    lanes_left: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, summed))
    total = gl.sum(whole.slice(0, OUT).load(summed), axis=1) * UNIT
    part = gl.arange(0, OUT, layout=parts_left)
    lane = gl.arange(0, 32, layout=lanes_left)
    output = ((first_tile + part // (ROW_TILES * 4)) * 16 + part % 4 // 2 * 8)[:, None] + (lane // 4)[None, :]
    row = (first_row + part // 4 % ROW_TILES * 8 + part % 2)[:, None] + (lane % 4 * 2)[None, :]
    kept = (output < outputs) & (row < rows)
    dtype: gl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        total += gl.load(bias + output, mask=kept, other=0.0).to(gl.float32)
    if PAIRED:
        up = gl.sum(whole.slice(OUT, OUT).load(summed), axis=1) * UNIT
        if HAS_BIAS:
            up += gl.load(bias + outputs + output, mask=kept, other=0.0).to(gl.float32)
        # Rounded where torch's own operators round.
        gate = total.to(dtype).to(gl.float32)
        activated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        total = activated * up.to(dtype).to(gl.float32)
    target = out + (split * rows + row).to(gl.int64) * all_outputs + first_output + output
    if ADDS:
        total = total.to(dtype).to(gl.float32) + gl.load(target, mask=kept, other=0.0).to(gl.float32)
    gl.store(target, total.to(dtype), mask=kept)
