"""Rows times a weight, by few programs that stay: tiled_product.py's tiles, with reads that never pause.

    a unit       a block of OUTPUTS of the weight, one stretch of its columns, all rows
    copies       | t + 3 | t + 4 | ...    tiles of the weight and of the rows, from one unit to the next
    matrix units | tile t| t + 1 | ...
    a program    units p, p + P, p + 2P, ...

As in row_stream.py every processor has its share of the programs, and the weight's first tiles are on their way while
the kernels before are still at work. Parts are those of tiled_product.py, for rows that fit into one tile. Gluon,
Triton's lower language, for numbers of two bytes and Hopper's matrix units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramify.gpu.kernels.overlap import launch_options
from ramify.gpu.kernels.tiled_product import Tiles


@dataclass(frozen=True, slots=True)
class TileStream(Tiles):
    """programs: that a processor has at a time. `rows` is at least the number of rows."""

    programs: int = 1


def tile_stream(
    x: Tensor, weight: Tensor, parts: Tensor, tiles: TileStream, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """As tiled_product.tiled_product."""
    assert parts.shape == (tiles.splits, x.shape[0], weight.shape[0]), "one part a split"
    assert bias is None or tiles.splits == 1, "a bias is added to the whole sum"
    _launch(
        x, weight, parts, tiles, bias, weight.shape[0], x.shape[0] * weight.shape[0], is_paired=False, overlap=overlap
    )


def stream_gate_up(
    x: Tensor, weight: Tensor, out: Tensor, tiles: TileStream, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """As tiled_product.tiled_gate_up."""
    assert weight.shape[0] == 2 * out.shape[1], "gate and up are of one size"
    assert tiles.splits == 1, "silu needs the whole sum"
    _launch(x, weight, out, tiles, bias, out.shape[1], 0, is_paired=True, overlap=overlap)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiles: TileStream,
    bias: Tensor | None,
    outputs: int,
    part_stride: int,
    *,
    is_paired: bool,
    overlap: bool,
) -> None:
    rows, columns = x.shape
    row_tile = tiles.rows_of(rows)
    assert rows <= row_tile, "one tile of rows"
    chunks = triton.cdiv(columns, tiles.columns)
    per_split = triton.cdiv(chunks, tiles.splits)
    assert (tiles.splits - 1) * per_split < chunks, "every split has something to do"
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 1
    units = triton.cdiv(outputs, tiles.outputs) * tiles.splits
    _tile_stream[(min(units, processors * tiles.programs),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        columns,
        per_split,
        x.stride(0),
        part_stride,
        out.stride(-2),
        ROWS=row_tile,
        OUTPUTS=tiles.outputs,
        COLUMNS=tiles.columns,
        STAGES=tiles.stages,
        SPLITS=tiles.splits,
        HAS_BIAS=bias is not None,
        PAIRED=is_paired,
        num_warps=tiles.warps,
        **launch_options(overlap),
    )


@gluon.jit
def _rows_of(matrix, first, count, stride, lane, ROWS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Past the last row the last stands again, and what comes of it is not written."""
    row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), count - 1)
    return matrix + row.to(gl.int64)[:, None] * stride + lane[None, :]


@gluon.jit
def _copy(target, source, first, lane, end):  # type: ignore[no-untyped-def]
    """Columns first .. of some rows; past the end come zeros, which cost nothing."""
    async_copy.async_copy_global_to_shared(target, source + first, mask=(first + lane < end)[None, :])


@gluon.jit
def _tile_stream(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    columns,
    chunks_per_split,
    x_stride,
    part_stride,
    out_stride,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PAIRED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    warps: gl.constexpr = gl.num_warps()
    number: gl.constexpr = weight.dtype.element_ty
    lanes: gl.constexpr = COLUMNS // 8
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])  # sixteen bytes a thread
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, ROWS, 16])
    tiles = gl.allocate_shared_memory(number, [STAGES, OUTPUTS, COLUMNS], shared)
    if PAIRED:
        pairs = gl.allocate_shared_memory(number, [STAGES, OUTPUTS, COLUMNS], shared)
    values = gl.allocate_shared_memory(number, [STAGES, ROWS, COLUMNS], shared)
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, copied))
    blocks = gl.cdiv(outputs, OUTPUTS)
    units = blocks * SPLITS
    chunks = gl.cdiv(columns, COLUMNS)
    to_pair = outputs.to(gl.int64) * columns
    inputs = _rows_of(x, 0, rows, x_stride, lane, ROWS, copied)

    # What is copied next: chunk `ahead` of the unit `coming`, whose last chunk is `last`; after the last unit nothing.
    coming = gl.program_id(0)
    source = _rows_of(weight, coming % blocks * OUTPUTS, outputs, columns, lane, OUTPUTS, copied)
    first = coming // blocks * chunks_per_split
    ahead = first
    last = gl.minimum(first + chunks_per_split, chunks) - 1
    end = columns
    for stage in gl.static_range(STAGES - 1):
        _copy(tiles.index(stage), source, ahead * COLUMNS, lane, end)
        if PAIRED:
            _copy(pairs.index(stage), source + to_pair, ahead * COLUMNS, lane, end)
        ahead += 1
        if ahead > last:
            coming += gl.num_programs(0)
            source = _rows_of(weight, coming % blocks * OUTPUTS, outputs, columns, lane, OUTPUTS, copied)
            ahead = coming // blocks * chunks_per_split
            last = gl.minimum(ahead + chunks_per_split, chunks) - 1
            end = gl.where(coming < units, columns, 0)
    if OVERLAP:
        gdc_wait()
    # The rows of the same tiles, now that they are there.
    row_unit = gl.program_id(0)
    row_ahead = first
    row_last = gl.minimum(first + chunks_per_split, chunks) - 1
    for stage in gl.static_range(STAGES - 1):
        _copy(values.index(stage), inputs, row_ahead * COLUMNS, lane, gl.where(row_unit < units, columns, 0))
        async_copy.commit_group()
        row_ahead += 1
        if row_ahead > row_last:
            row_unit += gl.num_programs(0)
            row_ahead = row_unit // blocks * chunks_per_split
            row_last = gl.minimum(row_ahead + chunks_per_split, chunks) - 1

    here = 0
    filled = STAGES - 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block = unit % blocks
        split = unit // blocks
        sums = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=summed)
        pair_sums = sums
        for _ in range(split * chunks_per_split, gl.minimum((split + 1) * chunks_per_split, chunks)):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()  # what threads brought, the matrix units do not see otherwise
            gl.thread_barrier()
            _copy(tiles.index(filled), source, ahead * COLUMNS, lane, end)
            if PAIRED:
                _copy(pairs.index(filled), source + to_pair, ahead * COLUMNS, lane, end)
            _copy(values.index(filled), inputs, ahead * COLUMNS, lane, end)
            async_copy.commit_group()
            filled = gl.where(filled == STAGES - 1, 0, filled + 1)
            ahead += 1
            if ahead > last:
                coming += gl.num_programs(0)
                source = _rows_of(weight, coming % blocks * OUTPUTS, outputs, columns, lane, OUTPUTS, copied)
                ahead = coming // blocks * chunks_per_split
                last = gl.minimum(ahead + chunks_per_split, chunks) - 1
                end = gl.where(coming < units, columns, 0)
            right = values.index(here).permute((1, 0))
            sums = warpgroup_mma(tiles.index(here), right, sums)
            if PAIRED:
                pair_sums = warpgroup_mma(pairs.index(here), right, pair_sums)
            here = gl.where(here == STAGES - 1, 0, here + 1)

        output = block * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, summed))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, summed))
        kept = gl.minimum(output, outputs - 1)
        if HAS_BIAS:
            sums += gl.load(bias + kept).to(gl.float32)[:, None]
        dtype: gl.constexpr = out.dtype.element_ty
        if PAIRED:
            if HAS_BIAS:
                pair_sums += gl.load(bias + outputs + kept).to(gl.float32)[:, None]
            # Rounded where torch's own operators round.
            gate = sums.to(dtype).to(gl.float32)
            activated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
            sums = activated * pair_sums.to(dtype).to(gl.float32)
        target = out + split.to(gl.int64) * part_stride + row.to(gl.int64)[None, :] * out_stride + output[:, None]
        gl.store(target, sums.to(dtype), mask=(output < outputs)[:, None] & (row < rows)[None, :])
    async_copy.wait_group(0)
