"""PackedWeight: a weight that is held in few bits multiplies, part by part; each part has a number format of its own.

Tiles depend on the weight's shape and the number of rows alone, so that runs repeat.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.packed_product import packed_product
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.tiled_product import Tiles
from ramify.gpu.packed_parts import DensePart, PackedPart
from ramify.gpu.product_forms import MOST_ROWS, MOST_SPLITS, PROCESSORS
from ramify.gpu.products import Stream
from ramify.models.linear import Linear

# Columns follow from the format. A program holds two tiles of sums, so tiles of rows are narrow.
FEW_ROWS_TILES = Tiles(outputs=64, columns=0, stages=5, warps=4, rows=64)
MANY_ROWS_TILES = Tiles(outputs=128, columns=0, stages=3, warps=8, rows=128)


class PackedWeight:
    """A `Weight` of which at least one part is held in few bits."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._parts: list[tuple[int, DensePart | PackedPart]] = []
        for first_row, part in sorted(linear.parts.items()):
            assert isinstance(part, DensePart | PackedPart)
            self._parts.append((first_row, part))
        self._order = self._parts[0][1].order
        assert all((part.order is None) == (self._order is None) for _, part in self._parts), "one order of columns"

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        return self._product(stream.normed(norm))

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        x = stream.normed(norm)
        both = torch.empty(1, x.shape[0], self._linear.weight.shape[0], dtype=x.dtype, device=x.device)
        self._write(x, both, self._linear.bias)
        silu_and_multiply(both[0], out)

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        stream.add(self._product(x))

    def logits(self, x: Tensor, out: Tensor) -> None:
        self._write(x, out[None], None)

    def _product(self, x: Tensor) -> Parts:
        """(T, columns) -> parts of (T, outputs)."""
        splits = splits_for(x.shape[0], *self._linear.weight.shape, block=self._largest_block)
        values = torch.empty(splits, x.shape[0], self._linear.weight.shape[0], dtype=torch.float32, device=x.device)
        self._write(x, values, None)
        return Parts(values, self._linear.bias)

    def _write(self, x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """x (T, columns) -> out (splits, T, outputs)."""
        tiles = replace(tiles_for(x.shape[0]), splits=out.shape[0])
        ordered = x if self._order is None else x.index_select(1, self._order)
        for first_row, part in self._parts:
            if isinstance(part, DensePart):
                rows = slice(first_row, first_row + len(part.weight))
                out[0, :, rows] = F.linear(x, part.weight, None if bias is None else bias[rows])
                out[1:, :, rows] = 0
                continue
            packed_product(
                ordered,
                part,
                out,
                tiles,
                first_output=first_row,
                bias=None if bias is None else bias[first_row : first_row + part.shape[0]],
                overlap=can_overlap(x.device),
            )

    @property
    def _largest_block(self) -> int:
        return max(part.stored_in.block_size for _, part in self._parts)


def tiles_for(rows: int) -> Tiles:
    return FEW_ROWS_TILES if rows <= MOST_ROWS else MANY_ROWS_TILES


def splits_for(rows: int, outputs: int, columns: int, *, block: int) -> int:
    """Columns are split while every program has a processor to itself and a block to walk."""
    tiles = tiles_for(rows)
    programs = -(-outputs // tiles.outputs) * -(-rows // tiles.rows_of(rows))
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * programs <= PROCESSORS and columns // (2 * splits) >= block:
        splits *= 2
    return splits
