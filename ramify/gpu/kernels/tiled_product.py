"""Rows times a weight in tiles, bound by reading the weight once where rows are few.

The weight is the left side of the matrix product, its rows the many, so the activations are the narrow side:

                 rows (16 to 256)
    weight       +---+
    +-----------+|x.T|        a program: BLOCK_OUTPUTS rows of the weight, one stretch of its columns, a tile of rows
    |   tile -> ||   |        programs:  blocks of outputs x splits of the columns x tiles of rows
    +-----------++---+

Few outputs would leave most of the chip idle, so columns are split and each split writes its part in float32; whoever
reads the product adds the parts up in their order (`Parts`). How a sum is cut is the caller's choice, `Tiles`: with the
same columns and splits, an element has the same bits however many rows there are and however they are tiled. Gate and
up are walked together, and only silu(gate) * up is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import LINE, launch_options, prefetch, start_next, wait_for_last

FEWEST_ROWS = 16  # of a tile: what the matrix units take
MOST_ROWS = 256
LINES = tl.constexpr(4)  # of each weight row that a program asks for before it may start
# Programs that run together read the same few tiles of rows and of the weight, from the cache.
GROUP = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program holds of the weight at a time, how many such are on their way, and the cuts of the columns.

    rows: the most that a program multiplies; a power of two, from 16 to 256.
    """

    outputs: int
    columns: int
    stages: int
    warps: int
    splits: int = 1
    rows: int = MOST_ROWS

    def rows_of(self, count: int) -> int:
        """The rows of a program's tile where there are so many in all."""
        return min(self.rows, max(FEWEST_ROWS, 1 << (count - 1).bit_length()))

    def shared_memory(self, count: int, itemsize: int, *, num_weights: int = 1) -> int:
        """The bytes that a program's stages take, with so many rows in all."""
        return self.stages * itemsize * self.columns * (num_weights * self.outputs + self.rows_of(count))


def tiled_product(
    x: Tensor, weight: Tensor, parts: Tensor, tiles: Tiles, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """x (rows, columns), weight (outputs, columns) -> parts (splits, rows, outputs), to be added up.

    Several parts are float32. One may be of any precision, and have the bias (outputs,) in it already.
    """
    rows, columns = x.shape
    outputs = weight.shape[0]
    assert parts.shape == (tiles.splits, rows, outputs), "one part a split"
    assert parts.is_contiguous(), "parts lie one after the other"
    assert bias is None or tiles.splits == 1, "a bias is added to the whole sum"
    row_tile = tiles.rows_of(rows)
    row_tiles = triton.cdiv(rows, row_tile)
    blocks = triton.cdiv(columns, tiles.columns)
    _tiled_product[(triton.cdiv(outputs, tiles.outputs) * row_tiles, tiles.splits)](
        x,
        weight,
        weight if bias is None else bias,
        parts,
        rows,
        outputs,
        columns,
        triton.cdiv(blocks, tiles.splits) * tiles.columns,
        row_tiles,
        x.stride(0),
        BLOCK_ROWS=row_tile,
        BLOCK_OUTPUTS=tiles.outputs,
        BLOCK_COLUMNS=tiles.columns,
        ONE_TILE=row_tiles == 1,
        EVEN=columns % tiles.columns == 0,
        HAS_BIAS=bias is not None,
        PER_LINE=LINE // weight.itemsize,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )


def tiled_gate_up(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """x (rows, columns), weight (2 * inner, columns), gate first -> out (rows, inner): silu(gate) * up."""
    rows, columns = x.shape
    inner = out.shape[1]
    assert weight.shape[0] == 2 * inner, "gate and up are of one size"
    assert tiles.splits == 1, "silu needs the whole sum"
    row_tile = tiles.rows_of(rows)
    row_tiles = triton.cdiv(rows, row_tile)
    _tiled_gate_up[(triton.cdiv(inner, tiles.outputs) * row_tiles,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        inner,
        columns,
        row_tiles,
        x.stride(0),
        out.stride(0),
        BLOCK_ROWS=row_tile,
        BLOCK_OUTPUTS=tiles.outputs,
        BLOCK_COLUMNS=tiles.columns,
        ONE_TILE=row_tiles == 1,
        EVEN=columns % tiles.columns == 0,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        # In a chain of its own kind it was slower with overlap in all 37 cases measured, by 11 % in the median.
        **launch_options(overlap, early=False),
    )


@triton.jit
def place(  # type: ignore[no-untyped-def]
    program, outputs, row_tiles, BLOCK_OUTPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, ONE_TILE: tl.constexpr
):
    """The block of outputs and the rows that a program computes: GROUP tiles of rows, then the next outputs."""
    block = program
    row = tl.arange(0, BLOCK_ROWS)
    if not ONE_TILE:
        in_group = GROUP * tl.cdiv(outputs, BLOCK_OUTPUTS)
        first = program // in_group * GROUP
        size = tl.minimum(row_tiles - first, GROUP)
        block = program % in_group // size
        row = (first + program % in_group % size).to(tl.int64) * BLOCK_ROWS + row
    return block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), row


@triton.jit
def _tiled_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    parts,
    rows,
    outputs,
    columns,
    columns_per_split,
    row_tiles,
    x_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    output, row = place(tl.program_id(0), outputs, row_tiles, BLOCK_OUTPUTS, BLOCK_ROWS, ONE_TILE)
    kept = tl.minimum(output, outputs - 1)
    split = tl.program_id(1)
    lane = tl.arange(0, BLOCK_COLUMNS)
    start = split * columns_per_split
    end = tl.minimum(start + columns_per_split, columns)
    # Past the ends the last output and the last row are read again, and not written.
    source = weight + kept.to(tl.int64)[:, None] * columns
    inputs = x + tl.minimum(row, rows - 1)[None, :] * x_stride + lane[:, None]
    if OVERLAP:
        line = tl.minimum(start + tl.arange(0, LINES) * PER_LINE, columns - 1)
        prefetch(source + line[None, :])
    wait_for_last(OVERLAP)
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for at in range(start, end, BLOCK_COLUMNS):
        if EVEN:
            tile = tl.load(source + (at + lane)[None, :])
            values = tl.load(inputs + at)
        else:
            inside = at + lane < end
            tile = tl.load(source + (at + lane)[None, :], mask=inside[None, :], other=0.0)
            values = tl.load(inputs + at, mask=inside[:, None], other=0.0)
        sums = tl.dot(tile, values, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + kept).to(tl.float32)[:, None]
    target = parts + (split * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(target, sums.to(parts.dtype.element_ty), mask=(output < outputs)[:, None] & (row < rows)[None, :])


@triton.jit
def _tiled_gate_up(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    columns,
    row_tiles,
    x_stride,
    out_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    output, row = place(tl.program_id(0), inner, row_tiles, BLOCK_OUTPUTS, BLOCK_ROWS, ONE_TILE)
    kept = tl.minimum(output, inner - 1)
    lane = tl.arange(0, BLOCK_COLUMNS)
    gate_source = weight + kept.to(tl.int64)[:, None] * columns
    up_source = gate_source + inner.to(tl.int64) * columns
    inputs = x + tl.minimum(row, rows - 1)[None, :] * x_stride + lane[:, None]
    wait_for_last(OVERLAP)
    gate = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for at in range(0, columns, BLOCK_COLUMNS):
        if EVEN:
            gate_tile = tl.load(gate_source + (at + lane)[None, :])
            up_tile = tl.load(up_source + (at + lane)[None, :])
            values = tl.load(inputs + at)
        else:
            inside = at + lane < columns
            gate_tile = tl.load(gate_source + (at + lane)[None, :], mask=inside[None, :], other=0.0)
            up_tile = tl.load(up_source + (at + lane)[None, :], mask=inside[None, :], other=0.0)
            values = tl.load(inputs + at, mask=inside[:, None], other=0.0)
        gate = tl.dot(gate_tile, values, gate, input_precision="ieee")
        up = tl.dot(up_tile, values, up, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias + kept).to(tl.float32)[:, None]
        up += tl.load(bias + inner + kept).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    # Rounded where torch's own operators round.
    rounded = gate.to(dtype).to(tl.float32)
    activated = (rounded / (1.0 + tl.exp(-rounded))).to(dtype).to(tl.float32)
    product = activated * up.to(dtype).to(tl.float32)
    target = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(target, product.to(dtype), mask=(output < inner)[:, None] & (row < rows)[None, :])
