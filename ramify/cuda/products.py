"""How a weight multiplies on a GPU: kernels of our own where rows are few, cuBLAS where they are many.

Up to MOST_ROWS rows a product is bound by reading its weight, and cuBLAS reads at 2.3 to 3 TB/s where an H200 copies at
4.3. The choice and the tiles depend on the weight's shape and the padded number of rows alone, not on a measurement at
start-up, so that runs repeat.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ramify.kernels.activation import silu_and_multiply
from ramify.kernels.few_rows_product import (
    MOST_ROWS,
    Tiles,
    few_rows_gate_up,
    few_rows_product,
    padded_rows,
)
from ramify.kernels.overlap import can_overlap
from ramify.kernels.parts import Parts
from ramify.models.linear import Linear

SHARED_MEMORY = 96 * 1024  # bytes that a program may take on the smallest chips
MOST_SPLITS = 16
FEWEST_PROGRAMS = 264  # two for each processor of an H200


def has_one_row(x: Tensor) -> bool:
    """Whether x (T, columns) goes through the decoder as one row does."""
    return x.shape[0] == 1


def has_few_rows(x: Tensor) -> bool:
    """Whether products of x (T, columns) are our own.

    In float32 the matrix units would round the factors and without them we are no faster, so it is cuBLAS's, except
    where kernels are interpreted: that is where they are proven.
    """
    return x.shape[0] <= MOST_ROWS and (x.device.type == "cpu" or x.dtype.itemsize == 2)


def product(linear: Linear, x: Tensor) -> Parts:
    """(T, columns) -> parts of (T, outputs)."""
    if not has_few_rows(x):
        return Parts.whole(linear.product(x).contiguous())
    rows, (outputs, columns) = x.shape[0], linear.weight.shape
    tiles = tiles_for(rows, outputs, columns)
    values = torch.empty(tiles.splits, rows, outputs, dtype=torch.float32, device=x.device)
    few_rows_product(x, linear.weight, values, tiles, overlap=can_overlap(x.device))
    return Parts(values, linear.bias)


def gate_up(linear: Linear, x: Tensor, out: Tensor) -> None:
    """(T, columns) -> out (T, inner): silu(gate) * up."""
    if has_few_rows(x):
        tiles = gate_up_tiles_for(x.shape[0])
        few_rows_gate_up(x, linear.weight, out, tiles, bias=linear.bias, overlap=can_overlap(x.device))
    else:
        silu_and_multiply(linear.product(x).contiguous(), out)


def head(linear: Linear, x: Tensor) -> Tensor:
    """(R, hidden) -> logits (R, vocabulary) in float32, summed and written in float32 whatever the precision."""
    if has_few_rows(x):
        logits = torch.empty(1, x.shape[0], linear.weight.shape[0], dtype=torch.float32, device=x.device)
        few_rows_product(x, linear.weight, logits, head_tiles_for(x.shape[0]), overlap=can_overlap(x.device))
        return logits[0]
    if x.device.type == "cuda" and x.dtype is not torch.float32:
        return torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return linear.product(x).float().contiguous()


def tiles_for(rows: int, outputs: int, columns: int) -> Tiles:
    """Columns are split until there are programs enough for the whole chip, while each split is worth a program."""
    tiles, splits = head_tiles_for(rows), 1
    while (
        splits < MOST_SPLITS
        and -(-outputs // tiles.outputs) * splits < FEWEST_PROGRAMS
        and columns // (2 * splits) >= tiles.columns
    ):
        splits *= 2
    return replace(tiles, splits=splits)


def head_tiles_for(rows: int) -> Tiles:
    """Many outputs: no splits."""
    return _fitting(Tiles(outputs=64, columns=128, stages=4, warps=4), rows, num_weights=1)


def gate_up_tiles_for(rows: int) -> Tiles:
    return _fitting(Tiles(outputs=64, columns=64, stages=4, warps=4), rows, num_weights=2)


def _fitting(tiles: Tiles, rows: int, *, num_weights: int) -> Tiles:
    """With as many stages as every chip's shared memory holds, in 16 bits."""
    stage = 2 * tiles.columns * (num_weights * tiles.outputs + padded_rows(rows))
    return replace(tiles, stages=min(tiles.stages, SHARED_MEMORY // stage))
