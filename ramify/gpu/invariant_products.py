"""A weight whose products have the same bits however many rows there are: `batch_invariant`.

Every product, of one row or of thousands, is that of one family of kernels: the weight's outputs are the matrix
instruction's rows, the activations its columns, and a sum runs over the weight's columns in their order, in a number of
splits that follows from the weight's shape alone. How many outputs and rows a program takes changes no bit, so that is
chosen by the number of rows; so is who adds the splits up, the reader (`Parts`) or the program itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ramify.gpu.kernels.folded_product import folded_product
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.tiled_product import Tiles, tiled_gate_up, tiled_product
from ramify.gpu.product_forms import PROCESSORS, Pace
from ramify.gpu.products import Stream, shared_memory_of
from ramify.models.linear import Linear

COLUMNS = 64  # of a tile: where splits begin follows from it
OUTPUTS = 64
MOST_SPLITS = 4  # more parts cost many rows more than few rows gain

# From so many rows on, by how many outputs and rows a program takes: as timed on an H200 for the shapes of 0.6B, 1.5B
# and 8B models.
TILES = (
    (0, Tiles(outputs=64, columns=COLUMNS, stages=6, warps=4, rows=64)),
    (129, Tiles(outputs=64, columns=COLUMNS, stages=4, warps=8, rows=256)),
    (513, Tiles(outputs=128, columns=COLUMNS, stages=4, warps=8, rows=128)),
)
GATE_UP_TILES = (
    (0, Tiles(outputs=64, columns=COLUMNS, stages=4, warps=4, rows=64)),
    (129, Tiles(outputs=64, columns=COLUMNS, stages=3, warps=4, rows=128)),
)
HEAD_TILES = (
    (0, Tiles(outputs=64, columns=COLUMNS, stages=4, warps=4, rows=64)),
    (65, Tiles(outputs=128, columns=COLUMNS, stages=3, warps=8, rows=128)),
)


class InvariantWeight:
    """A `Weight`; the bits of a row's product depend on that row and the weight alone."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._splits = splits_of(*linear.weight.shape)

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        return self._product(stream.normed(norm), overlap=stream.overlap)

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        x = stream.normed(norm)
        tiles = _fitting(GATE_UP_TILES, x, num_weights=2)
        tiled_gate_up(x, self._linear.weight, out, tiles, bias=self._linear.bias, overlap=stream.overlap)

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        stream.add(self._product(x, overlap=stream.overlap))

    def logits(self, x: Tensor, out: Tensor) -> None:
        tiled_product(x, self._linear.weight, out[None], _fitting(HEAD_TILES, x), overlap=can_overlap(x.device))

    def ahead(self, rows: int, pace: Pace) -> None:
        """Nothing: it would be chosen by measuring."""

    def _product(self, x: Tensor, *, overlap: bool) -> Parts:
        """(T, columns) -> parts of (T, outputs)."""
        linear, (rows, outputs) = self._linear, (x.shape[0], self._linear.weight.shape[0])
        tiles = replace(_fitting(TILES, x), splits=self._splits)
        programs = -(-outputs // tiles.outputs) * -(-rows // tiles.rows_of(rows))
        if self._splits == 1 or programs >= PROCESSORS:
            whole = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
            folded_product(x, linear.weight, whole, tiles, bias=linear.bias, overlap=overlap)
            return Parts.whole(whole)
        values = torch.empty(tiles.splits, rows, outputs, dtype=torch.float32, device=x.device)
        tiled_product(x, linear.weight, values, tiles, overlap=overlap)
        return Parts(values, linear.bias)


def splits_of(outputs: int, columns: int) -> int:
    """Columns are split while, with few rows, every program has a processor to itself and several tiles to walk."""
    splits, blocks = 1, -(-outputs // OUTPUTS)
    while splits < MOST_SPLITS and 2 * splits * blocks <= PROCESSORS and columns // (2 * splits) >= 2 * COLUMNS:
        splits *= 2
    return splits


def _fitting(choices: tuple[tuple[int, Tiles], ...], x: Tensor, *, num_weights: int = 1) -> Tiles:
    """The tiles for so many rows, with as many stages as shared memory holds."""
    rows = x.shape[0]
    tiles = next(tiles for fewest, tiles in reversed(choices) if rows >= fewest)
    if x.dtype.itemsize == 4:  # without matrix units sums are in registers: larger tiles would not fit
        tiles = replace(tiles, outputs=32, rows=32, warps=4)
    stage = replace(tiles, stages=1).shared_memory(rows, x.dtype.itemsize, num_weights=num_weights)
    return replace(tiles, stages=max(1, min(tiles.stages, shared_memory_of(x.device) // stage)))
