"""PackedWeight: a weight that is held in few bits multiplies, part by part; each part has a number format of its own.

Up to `MOST_PACKED_ROWS` the kernel of packed_rows.py reads it as it is, at the speed of memory. More rows are bound by
the matrix units, which then had better not wait for unpacking: the weight is written out, some outputs at a time, and
multiplied by cuBLAS. So it is too where that kernel has no instructions: in float32, and where kernels are interpreted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.packed_rows import can_multiply, packed_gate_up, packed_rows
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.unpacked import unpack
from ramify.gpu.packed_forms import tiles_for
from ramify.gpu.packed_parts import OUTPUTS, DensePart, PackedPart
from ramify.gpu.products import Stream
from ramify.models.linear import Linear

MOST_PACKED_ROWS = 128
UNPACKED_BYTES = 2**26  # of a weight written out at a time


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
        only = self._parts[0][1]
        # The one part that there is, in which kernels may do more than multiply.
        self._whole = only if len(self._parts) == 1 and isinstance(only, PackedPart) else None

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        if self._whole is None or self._order is not None or stream.num_rows > 1 or not self._reads(1, norm.weight):
            return self._product(stream.normed(norm))
        out = stream.values.new_empty(1, 1, self._whole.shape[0])
        self._multiply(stream.values, self._whole, out, self._linear.bias, norm=norm)
        return Parts(out)

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        whole, rows = self._whole, out.shape[0]
        if whole is None or not self._reads(rows, norm.weight) or out.shape[1] % OUTPUTS:
            x = stream.normed(norm)
            both = torch.empty(1, rows, self._linear.weight.shape[0], dtype=x.dtype, device=x.device)
            self._write(x, both, self._linear.bias)
            silu_and_multiply(both[0], out)
            return
        inside = rows == 1 and self._order is None
        x = stream.values if inside else self._ordered(stream.normed(norm))
        tiles = tiles_for(rows, out.shape[1], x.shape[1], whole.bits, is_paired=True, can_split=False)
        packed_gate_up(
            x, whole, out, tiles,
            bias=self._linear.bias, norm=norm if inside else None, overlap=can_overlap(x.device),
        )  # fmt: skip

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        if self._whole is None or x.shape[0] > 1 or not self._reads(1, x):
            stream.add(self._product(x))
        else:
            self._multiply(self._ordered(x), self._whole, stream.values[None], self._linear.bias, adds=True)

    def logits(self, x: Tensor, out: Tensor) -> None:
        self._write(x, out[None], None)

    def _product(self, x: Tensor) -> Parts:
        """(T, columns) -> parts of (T, outputs)."""
        rows, outputs = x.shape[0], self._linear.weight.shape[0]
        splits = 1
        if self._whole is not None and self._reads(rows, x):
            tiles = tiles_for(rows, outputs, x.shape[1], self._whole.bits, is_paired=False, can_split=True)
            splits = tiles.splits
        if splits == 1:  # rounded once, here, as its reader would
            out = x.new_empty(1, rows, outputs)
            self._write(x, out, self._linear.bias)
            return Parts(out)
        values = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
        self._write(x, values, None)
        return Parts(values, self._linear.bias)

    def _write(self, x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """x (T, columns) -> out (splits, T, outputs)."""
        ordered = self._ordered(x)
        for first_row, part in self._parts:
            rows = slice(first_row, first_row + part.shape[0])
            own_bias = None if bias is None else bias[rows]
            if isinstance(part, DensePart):
                out[0, :, rows] = F.linear(x, part.weight, own_bias)
            elif self._reads(x.shape[0], x):
                self._multiply(ordered, part, out, own_bias, first_output=first_row)
            else:
                _multiply_unpacked(ordered, part, out[0, :, rows], own_bias)

    def _multiply(
        self,
        x: Tensor,
        part: PackedPart,
        out: Tensor,
        bias: Tensor | None,
        *,
        first_output: int = 0,
        norm: Norm | None = None,
        adds: bool = False,
    ) -> None:
        rows, columns = x.shape
        tiles = tiles_for(rows, part.shape[0], columns, part.bits, is_paired=False, can_split=out.shape[0] > 1)
        assert tiles.splits == out.shape[0], "of a weight of one part"
        packed_rows(
            x, part, out, tiles,
            first_output=first_output, bias=bias, norm=norm, adds=adds, overlap=can_overlap(x.device),
        )  # fmt: skip

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    def _reads(self, rows: int, of: Tensor) -> bool:
        """Whether products of so many rows, in this tensor's precision, read the weight as it is."""
        parts = [part for _, part in self._parts if isinstance(part, PackedPart)]
        return rows <= MOST_PACKED_ROWS and all(can_multiply(of.dtype, part) for part in parts)


def _multiply_unpacked(x: Tensor, part: PackedPart, out: Tensor, bias: Tensor | None) -> None:
    """x (T, columns) -> out (T, outputs), rows of which may lie apart."""
    outputs, columns = part.shape
    tiles_at_once = max(1, UNPACKED_BYTES // (OUTPUTS * columns * x.itemsize))
    for first_tile in range(0, part.numbers.shape[0], tiles_at_once):
        rows = slice(first_tile * OUTPUTS, min((first_tile + tiles_at_once) * OUTPUTS, outputs))
        weight = x.new_empty(rows.stop - rows.start, columns)
        unpack(part, first_tile, weight)
        if out.dtype is not x.dtype:
            out[:, rows] = F.linear(x, weight, None if bias is None else bias[rows])
        elif bias is None:
            torch.mm(x, weight.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, weight.t(), out=out[:, rows])
