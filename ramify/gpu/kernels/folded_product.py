"""Many rows times a weight: the sums of `tiled_product` with the same splits, added up by the program that made them.

    columns     |  split 0   |  split 1   |  split 2   |        walked one after the other by one program
    sums           s0     +     s1     +     s2                 in float32, in their order, + bias, rounded once

That is what a reader of `Parts` computes, bit for bit, without the parts ever being in memory. It pays where rows are
many enough for the chip without splitting.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.tiled_product import Tiles, place


def folded_product(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles, *, bias: Tensor | None = None, overlap: bool = False
) -> None:
    """x (rows, columns), weight (outputs, columns) -> out (rows, outputs), of any precision."""
    rows, columns = x.shape
    outputs = weight.shape[0]
    assert out.is_contiguous(), "rows lie one after the other"
    row_tile = tiles.rows_of(rows)
    row_tiles = triton.cdiv(rows, row_tile)
    blocks = triton.cdiv(columns, tiles.columns)
    _folded_product[(triton.cdiv(outputs, tiles.outputs) * row_tiles,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
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
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )


@triton.jit
def _folded_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
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
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    output, row = place(tl.program_id(0), outputs, row_tiles, BLOCK_OUTPUTS, BLOCK_ROWS, ONE_TILE)
    kept = tl.minimum(output, outputs - 1)
    lane = tl.arange(0, BLOCK_COLUMNS)
    # Past the ends the last output and the last row are read again, and not written.
    source = weight + kept.to(tl.int64)[:, None] * columns + lane[None, :]
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * x_stride + lane[:, None]
    wait_for_last(OVERLAP)
    whole = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, columns, columns_per_split):
        end = tl.minimum(start + columns_per_split, columns)
        sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
        for at in range(start, end, BLOCK_COLUMNS):
            if EVEN:
                tile = tl.load(source + at)
                values = tl.load(inputs + at)
            else:
                inside = at + lane < end
                tile = tl.load(source + at, mask=inside[None, :], other=0.0)
                values = tl.load(inputs + at, mask=inside[:, None], other=0.0)
            sums = tl.dot(tile, values, sums, input_precision="ieee")
        whole = tl.where(start == 0, sums, whole + sums)
    if HAS_BIAS:
        whole += tl.load(bias + kept).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(target, whole.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (row < rows)[None, :])
