"""How a weight multiplies on a GPU: kernels of our own where rows are few, cuBLAS where they are many.

Up to MOST_ROWS rows a product is bound by reading its weight, and cuBLAS reads at 2.3 to 3 TB/s where an H200 copies at
4.3. The choice and the tiles depend on the weight's shape and the padded number of rows alone, not on a measurement at
start-up, so that runs repeat.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.norm import add_rms_norm
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm, RowTiles, row_gate_up, row_product
from ramify.gpu.kernels.tiled_product import Tiles, tiled_gate_up, tiled_product
from ramify.models.linear import Linear

# As timed on an H200 (bench/products.py) for the shapes of 1.5B and 3B models, 1 to 64 rows. All products of a model
# together come to at most 6 % over the best tiles of each; single ones are up to a fifth over theirs.
ROW_TILES = RowTiles(outputs=2, columns=1024, warps=4)
ROW_GATE_UP_TILES = RowTiles(outputs=4, columns=256, warps=1, stages=4)
ROW_HEAD_TILES = RowTiles(outputs=8, columns=256, warps=1, stages=3)
FEW_ROWS_TILES = Tiles(outputs=64, columns=128, stages=4, warps=4)
FEW_ROWS_GATE_UP_TILES = Tiles(outputs=64, columns=64, stages=4, warps=4)
# At 2 rows the tiles above took a sixth longer than at 8 for gate and up, these did not.
VERY_FEW_ROWS = 4
VERY_FEW_ROWS_TILES = Tiles(outputs=128, columns=64, stages=4, warps=8)

MOST_ROWS = 64  # beyond, products are bound by the matrix units, and cuBLAS's
PROCESSORS = 132  # of an H200; another chip gets the same cuts, and with them the same results
MOST_SPLITS = 8  # each costs whoever adds the parts up 0.15 us
LEAST_SHARED_MEMORY = 96 * 1024  # bytes that a program may take on the smallest chips


def has_one_row(x: Tensor) -> bool:
    """Whether x (T, columns) goes through the decoder as one row does."""
    return x.shape[0] == 1


def has_few_rows(x: Tensor) -> bool:
    """Whether products of x (T, columns) are our own.

    In float32 the matrix units would round the factors and without them we are no faster, so it is cuBLAS's, except
    where kernels are interpreted: that is where they are proven.
    """
    return x.shape[0] <= MOST_ROWS and (x.device.type == "cpu" or x.dtype.itemsize == 2)


class Stream:
    """The residual stream (T, hidden), and what the last product adds to it before it is next read."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._pending: Parts | None = None
        self._normed = torch.empty_like(values)

    @property
    def values(self) -> Tensor:
        """With what is pending: where weights of several kinds follow each other, one may not wait for a norm."""
        if self._pending is not None:
            parts, bias = self._pending
            total = parts.float().sum(0) if bias is None else parts.float().sum(0) + bias
            self._values += total.to(self._values.dtype)
            self._pending = None
        return self._values

    @property
    def num_rows(self) -> int:
        return self._values.shape[0]

    def add(self, delta: Parts) -> None:
        assert self._pending is None, "what was added before is taken in by the norm between"
        self._pending = delta

    def normed(self, norm: Norm) -> Tensor:
        """Takes in what is pending; returns the norm (T, hidden), in memory that the next one will overwrite."""
        overlap = can_overlap(self._values.device)
        add_rms_norm(self._values, self._pending, norm.weight, norm.eps, self._normed, overlap=overlap)
        self._pending = None
        return self._normed


class Weight(Protocol):
    """A weight (outputs, columns) on a GPU, whatever form it is kept in: all that the layers know of it."""

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        """The product of the stream's norm (T, columns), in parts of (T, outputs)."""

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        """The same, of gate over up: out (T, outputs / 2) = silu(gate) * up."""

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        """The product of x (T, columns) is added to the stream."""

    def logits(self, x: Tensor, out: Tensor) -> None:
        """The product of x (R, columns) to out (R, outputs) float32, summed in float32 whatever the precision."""


class DenseWeight:
    """A weight as it is in memory: the one place where kernels see its tensor.

    One row, where starting a kernel takes as long as its work, has norms and residual adds done by the products
    themselves; several rows leave a product in parts, which whoever reads it adds up.
    """

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        if stream.num_rows != 1:
            return self._product(stream.normed(norm))
        out = stream.values.new_empty(1, self._linear.weight.shape[0])
        self._row_product(stream.values, out, ROW_TILES, norm=norm)
        return Parts.whole(out)

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        weight, bias = self._linear.weight, self._linear.bias
        overlap = can_overlap(out.device)
        if stream.num_rows == 1:
            row_gate_up(stream.values, weight, out, tiles=ROW_GATE_UP_TILES, bias=bias, norm=norm, overlap=overlap)
            return
        x = stream.normed(norm)
        if has_few_rows(x):
            tiles = gate_up_tiles_for(x.shape[0], shared_memory_of(x.device))
            tiled_gate_up(x, weight, out, tiles, bias=bias, overlap=overlap)
        else:
            silu_and_multiply(self._linear.product(x).contiguous(), out)

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        if has_one_row(x):
            self._row_product(x, stream.values, ROW_TILES, adds=True)
        else:
            stream.add(self._product(x))

    def logits(self, x: Tensor, out: Tensor) -> None:
        weight, overlap = self._linear.weight, can_overlap(x.device)
        if has_one_row(x):
            self._row_product(x, out, ROW_HEAD_TILES)
        elif has_few_rows(x):
            tiled_product(x, weight, out[None], head_tiles_for(x.shape[0]), overlap=overlap)
        elif x.device.type == "cuda" and x.dtype is not torch.float32:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            out.copy_(self._linear.product(x))

    def _product(self, x: Tensor) -> Parts:
        """(T, columns) -> parts of (T, outputs)."""
        if not has_few_rows(x):
            return Parts.whole(self._linear.product(x).contiguous())
        rows, (outputs, columns) = x.shape[0], self._linear.weight.shape
        tiles = tiles_for(rows, outputs, columns, shared_memory_of(x.device))
        values = torch.empty(tiles.splits, rows, outputs, dtype=torch.float32, device=x.device)
        tiled_product(x, self._linear.weight, values, tiles, overlap=can_overlap(x.device))
        return Parts(values, self._linear.bias)

    def _row_product(
        self, x: Tensor, out: Tensor, tiles: RowTiles, *, norm: Norm | None = None, adds: bool = False
    ) -> None:
        linear, overlap = self._linear, can_overlap(x.device)
        row_product(x, linear.weight, out, tiles=tiles, bias=linear.bias, norm=norm, adds=adds, overlap=overlap)


def tiles_for(rows: int, outputs: int, columns: int, shared_memory: int = LEAST_SHARED_MEMORY) -> Tiles:
    """Columns are split while every program has a processor to itself and more than a tile to walk.

    24 such programs read 1.25 TB/s, so 80 can ask for all that the memory gives; each further part is only more for its
    reader to add up.
    """
    tiles = _fitting(FEW_ROWS_TILES, rows, shared_memory)
    splits, blocks = 1, -(-outputs // tiles.outputs)
    while splits < MOST_SPLITS and 2 * splits * blocks <= PROCESSORS and columns // (2 * splits) >= tiles.columns:
        splits *= 2
    return replace(tiles, splits=splits)


def gate_up_tiles_for(rows: int, shared_memory: int = LEAST_SHARED_MEMORY) -> Tiles:
    tiles = VERY_FEW_ROWS_TILES if rows <= VERY_FEW_ROWS else FEW_ROWS_GATE_UP_TILES
    return _fitting(tiles, rows, shared_memory, num_weights=2)


def head_tiles_for(rows: int) -> Tiles:
    """Many programs one after the other, so there is room for two on a processor of any chip."""
    return _fitting(VERY_FEW_ROWS_TILES if rows <= VERY_FEW_ROWS else FEW_ROWS_TILES, rows, LEAST_SHARED_MEMORY)


def _fitting(tiles: Tiles, rows: int, shared_memory: int, *, num_weights: int = 1) -> Tiles:
    """With as many stages as shared memory holds, in 16 bits."""
    stage = replace(tiles, stages=1).shared_memory(rows, 2, num_weights=num_weights)
    return replace(tiles, stages=min(tiles.stages, shared_memory // stage))


@cache
def shared_memory_of(device: torch.device) -> int:
    """What a program may take, in bytes; where kernels are interpreted, as little as anywhere."""
    if device.type != "cuda":
        return LEAST_SHARED_MEMORY
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
