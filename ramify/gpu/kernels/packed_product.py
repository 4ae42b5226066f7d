"""Rows times a weight of few bits, which is unpacked in registers on its way to the matrix units.

    sums (outputs, rows) += dot(numbers - zero, x) * scale          block by block along the columns

Numbers less their zero are exact in 16 bits, and a scale multiplies the sum of its block in float32: a product is that
of the dequantised weight up to the order of sums, in any precision of x. Where rows are few the time is that of reading
the numbers; where they are many, a tile is unpacked once for up to 256 rows.

A nibble becomes a float without a conversion: put into the low bits of 1024 (of bfloat16: 128) it is that number more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.tiled_product import Tiles, place
from ramify.gpu.packed_parts import PackedPart

NIBBLES, OCTETS, FLOATS = 0, 1, 2


def packed_product(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: Tiles,
    *,
    first_output: int = 0,
    bias: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """x (rows, columns) in the order of the part's columns -> out (splits, rows, all outputs), from first_output on.

    Several splits are float32, and whoever reads them adds them up. One may be of any precision, and have the bias
    (outputs,) in it already.
    """
    (rows, columns), (outputs, depth) = x.shape, part.shape
    assert columns == depth, "x has the weight's columns"
    assert out.is_contiguous(), "splits lie one after the other"
    assert all(tensor.is_contiguous() for tensor in part.tensors), "rows of the weight lie one after the other"
    assert out.shape[:2] == (tiles.splits, rows), "one part a split"
    assert bias is None or tiles.splits == 1, "a bias is added to the whole sum"
    size = part.stored_in.block_size
    kind = NIBBLES if part.is_nibbles else OCTETS if part.stored_in.name.startswith("INT8") else FLOATS
    row_tile = tiles.rows_of(rows)
    row_tiles = triton.cdiv(rows, row_tile)
    _packed_product[(triton.cdiv(outputs, tiles.outputs) * row_tiles, tiles.splits)](
        x,
        part.numbers,
        part.scales,
        part.scales if kind == FLOATS else part.zeros,
        part.scales if bias is None else bias,
        out,
        rows,
        outputs,
        columns,
        out.shape[2],
        first_output,
        triton.cdiv(columns // size, tiles.splits) * size,
        row_tiles,
        x.stride(0),
        KIND=kind,
        SIZE=size,
        BLOCK_ROWS=row_tile,
        BLOCK_OUTPUTS=tiles.outputs,
        ONE_TILE=row_tiles == 1,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )


@triton.jit
def _number(nibble, zero, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """nibble, int16 in 0..15, less its zero, exactly."""
    if tl.float16 == DTYPE:
        number = (nibble | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024).to(tl.float16)
    elif tl.bfloat16 == DTYPE:
        number = (nibble | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128).to(tl.bfloat16)
    else:
        number = (nibble - zero).to(DTYPE)
    return number


@triton.jit
def _packed_product(  # type: ignore[no-untyped-def]
    x,
    numbers,
    scales,
    zeros,
    bias,
    out,
    rows,
    outputs,
    columns,
    all_outputs,
    first_output,
    columns_per_split,
    row_tiles,
    x_stride,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    output, row = place(tl.program_id(0), outputs, row_tiles, BLOCK_OUTPUTS, BLOCK_ROWS, ONE_TILE)
    # Past the ends the last output and the last row are read again, and not written.
    kept = tl.minimum(output, outputs - 1).to(tl.int64)
    split = tl.program_id(1)
    start = split * columns_per_split
    end = tl.minimum(start + columns_per_split, columns)
    WIDTH: tl.constexpr = SIZE // 2 if KIND == 0 else SIZE  # of a block's numbers in memory
    lane = tl.arange(0, WIDTH)
    source = numbers + kept[:, None] * (columns // SIZE * WIDTH) + lane[None, :]
    blocks = columns // SIZE
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * x_stride + lane[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_last(OVERLAP)
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for at in range(start, end, SIZE):
        block = at // SIZE
        tile = tl.load(source + block * WIDTH)
        scale = tl.load(scales + kept * blocks + block).to(tl.float32)
        part = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
        if KIND == 0:
            zero = tl.load(zeros + kept * blocks + block).to(tl.int16)[:, None]
            low, high = (tile & 15).to(tl.int16), (tile >> 4).to(tl.int16)
            part = tl.dot(_number(low, zero, dtype), tl.load(inputs + at), part, input_precision="ieee")
            part = tl.dot(_number(high, zero, dtype), tl.load(inputs + at + WIDTH), part, input_precision="ieee")
        elif KIND == 1:
            zero = tl.load(zeros + kept * blocks + block).to(tl.int16)[:, None]
            part = tl.dot((tile.to(tl.int16) - zero).to(dtype), tl.load(inputs + at), part, input_precision="ieee")
        else:
            part = tl.dot(tile.to(dtype), tl.load(inputs + at), part, input_precision="ieee")
        sums += part * scale[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + kept).to(tl.float32)[:, None]
    target = out + (split * rows + row).to(tl.int64)[None, :] * all_outputs + first_output + output[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (row < rows)[None, :])
