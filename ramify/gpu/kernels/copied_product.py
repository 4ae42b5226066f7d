"""Rows times a weight in tiles that the copy engine brings: what tiled_product.py does, without an address a thread.

A descriptor says where a matrix lies and how large its tiles are; a copy names a tile's corner. What lies past the
matrix comes as zeros. Descriptors are made where a kernel is launched and, like pointers, kept by a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ramify.gpu.kernels.overlap import LINE, launch_options, prefetch, start_next, wait_for_last
from ramify.gpu.kernels.tiled_product import GROUP, LINES, Tiles

ALIGNED = 16  # bytes: where rows of a matrix begin


@dataclass(frozen=True, slots=True)
class CopiedTiles(Tiles):
    """Tiles that the copy engine brings."""


def copied_product(
    x: Tensor, weight: Tensor, parts: Tensor, tiles: Tiles, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """As tiled_product.tiled_product; rows of both matrices are a multiple of 16 bytes."""
    rows, columns = x.shape
    outputs = weight.shape[0]
    row_tile = tiles.rows_of(rows)
    row_tiles = triton.cdiv(rows, row_tile)
    blocks = triton.cdiv(columns, tiles.columns)
    _copied_product[(triton.cdiv(outputs, tiles.outputs) * row_tiles, tiles.splits)](
        TensorDescriptor.from_tensor(x, [row_tile, tiles.columns]),
        TensorDescriptor.from_tensor(weight, [tiles.outputs, tiles.columns]),
        weight,
        weight if bias is None else bias,
        parts,
        rows,
        outputs,
        columns,
        triton.cdiv(blocks, tiles.splits) * tiles.columns,
        row_tiles,
        BLOCK_ROWS=row_tile,
        BLOCK_OUTPUTS=tiles.outputs,
        BLOCK_COLUMNS=tiles.columns,
        ONE_TILE=row_tiles == 1,
        HAS_BIAS=bias is not None,
        PER_LINE=LINE // weight.itemsize,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )


def copied_gate_up(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """As tiled_product.tiled_gate_up. A tile that reaches past the gate reads some of up, which is not kept."""
    rows, columns = x.shape
    inner = out.shape[1]
    row_tile = tiles.rows_of(rows)
    row_tiles = triton.cdiv(rows, row_tile)
    _copied_gate_up[(triton.cdiv(inner, tiles.outputs) * row_tiles,)](
        TensorDescriptor.from_tensor(x, [row_tile, tiles.columns]),
        TensorDescriptor.from_tensor(weight, [tiles.outputs, tiles.columns]),
        weight if bias is None else bias,
        out,
        rows,
        inner,
        columns,
        row_tiles,
        out.stride(0),
        BLOCK_ROWS=row_tile,
        BLOCK_OUTPUTS=tiles.outputs,
        BLOCK_COLUMNS=tiles.columns,
        ONE_TILE=row_tiles == 1,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap, early=False),
    )


@triton.jit
def corner(program, outputs, row_tiles, BLOCK_OUTPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, ONE_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first output and the first row of what a program computes, in the order of tiled_product.place."""
    block, tile = program, 0
    if not ONE_TILE:
        in_group = GROUP * tl.cdiv(outputs, BLOCK_OUTPUTS)
        first = program // in_group * GROUP
        size = tl.minimum(row_tiles - first, GROUP)
        block = program % in_group // size
        tile = first + program % in_group % size
    return block * BLOCK_OUTPUTS, tile * BLOCK_ROWS


@triton.jit
def _copied_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    weight_pointer,
    bias,
    parts,
    rows,
    outputs,
    columns,
    columns_per_split,
    row_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    first_output, first_row = corner(tl.program_id(0), outputs, row_tiles, BLOCK_OUTPUTS, BLOCK_ROWS, ONE_TILE)
    output = first_output + tl.arange(0, BLOCK_OUTPUTS)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    start = split * columns_per_split
    end = tl.minimum(start + columns_per_split, columns)
    if OVERLAP:
        line = tl.minimum(start + tl.arange(0, LINES) * PER_LINE, columns - 1)
        kept = tl.minimum(output, outputs - 1).to(tl.int64)
        prefetch(weight_pointer + kept[:, None] * columns + line[None, :])
    wait_for_last(OVERLAP)
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for at in range(start, end, BLOCK_COLUMNS):
        sums = tl.dot(weight.load([first_output, at]), x.load([first_row, at]).T, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + tl.minimum(output, outputs - 1)).to(tl.float32)[:, None]
    target = parts + (split * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(target, sums.to(parts.dtype.element_ty), mask=(output < outputs)[:, None] & (row < rows)[None, :])


@triton.jit
def _copied_gate_up(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    columns,
    row_tiles,
    out_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    first_output, first_row = corner(tl.program_id(0), inner, row_tiles, BLOCK_OUTPUTS, BLOCK_ROWS, ONE_TILE)
    wait_for_last(OVERLAP)
    gate = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for at in range(0, columns, BLOCK_COLUMNS):
        values = x.load([first_row, at]).T
        gate = tl.dot(weight.load([first_output, at]), values, gate, input_precision="ieee")
        up = tl.dot(weight.load([inner + first_output, at]), values, up, input_precision="ieee")
    output = first_output + tl.arange(0, BLOCK_OUTPUTS)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    if HAS_BIAS:
        kept = tl.minimum(output, inner - 1)
        gate += tl.load(bias + kept).to(tl.float32)[:, None]
        up += tl.load(bias + inner + kept).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    # Rounded where torch's own operators round.
    rounded = gate.to(dtype).to(tl.float32)
    activated = (rounded / (1.0 + tl.exp(-rounded))).to(dtype).to(tl.float32)
    product = activated * up.to(dtype).to(tl.float32)
    target = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(target, product.to(dtype), mask=(output < inner)[:, None] & (row < rows)[None, :])
