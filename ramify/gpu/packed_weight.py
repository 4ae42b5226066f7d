"""PackedWeight: a weight that is held in few bits multiplies, part by part; each part has a number format of its own.

Few rows are bound by reading the weight, and it is read as it is (packed_rows.py). More are bound by the matrix units,
which are given tiles that were unpacked meanwhile (packed_tiles.py). Where there are no instructions for either, in
float32 and where kernels are interpreted, the weight is written out, some outputs at a time, and multiplied by cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.ahead import Ahead
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.packed_rows import WarpTiles, packed_gate_up, packed_rows
from ramify.gpu.kernels.packed_tiles import RowBlocks, packed_gate_up_tiles, packed_tiles
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.unpacked import unpack
from ramify.gpu.packed_forms import form_for
from ramify.gpu.packed_parts import OUTPUTS, DensePart, PackedPart
from ramify.gpu.product_forms import MIB, Pace
from ramify.gpu.products import Stream
from ramify.models.linear import Linear

UNPACKED_BYTES = 2**28  # of a weight written out at a time


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
        whole = self._whole
        if whole is not None and self._order is None and stream.num_rows == 1:
            form = form_for(norm.weight.dtype, 1, whole, is_paired=False, can_split=False)
            if isinstance(form, WarpTiles):
                out = stream.values.new_empty(1, 1, whole.shape[0])
                bias, overlap = self._linear.bias, stream.overlap
                packed_rows(stream.values, whole, out, form, bias=bias, norm=norm, overlap=overlap)
                return Parts(out)
        return self._product(stream.normed(norm), overlap=stream.overlap)

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        (rows, inner), form = out.shape, None
        if self._whole is not None and not inner % OUTPUTS:
            form = form_for(out.dtype, rows, self._whole, is_paired=True, can_split=False)
        if isinstance(form, WarpTiles):
            assert self._whole is not None
            own_norm = norm if rows == 1 and self._order is None else None
            x = self._ordered(stream.normed(norm)) if own_norm is None else stream.values
            bias, overlap = self._linear.bias, stream.overlap
            packed_gate_up(x, self._whole, out, form, bias=bias, norm=own_norm, overlap=overlap)
            return
        x = stream.normed(norm)
        if isinstance(form, RowBlocks):
            assert self._whole is not None
            bias, overlap = self._linear.bias, stream.overlap
            packed_gate_up_tiles(self._ordered(x), self._whole, out, form, bias=bias, overlap=overlap)
            return
        both = torch.empty(1, rows, 2 * inner, dtype=x.dtype, device=x.device)
        self._write(x, both, self._linear.bias, overlap=stream.overlap)
        silu_and_multiply(both[0], out)

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        if self._whole is not None and x.shape[0] == 1:
            form = form_for(x.dtype, 1, self._whole, is_paired=False, can_split=False)
            if isinstance(form, WarpTiles):
                out, bias = stream.values[None], self._linear.bias
                packed_rows(self._ordered(x), self._whole, out, form, bias=bias, adds=True, overlap=stream.overlap)
                return
        stream.add(self._product(x, overlap=stream.overlap))

    def logits(self, x: Tensor, out: Tensor) -> None:
        self._write(x, out[None], None, overlap=can_overlap(x.device))

    def ahead(self, rows: int, pace: Pace) -> Ahead | None:  # noqa: ARG002 - warps begin all over their tiles' columns
        if self._whole is None or not pace.asks_ahead:
            return None
        return Ahead.of(self._whole.numbers, pace.asks_ahead * MIB, by_row=False)

    def _product(self, x: Tensor, *, overlap: bool) -> Parts:
        """(T, columns) -> parts of (T, outputs)."""
        rows, outputs = x.shape[0], self._linear.weight.shape[0]
        form = None
        if self._whole is not None:
            form = form_for(x.dtype, rows, self._whole, is_paired=False, can_split=True)
        if form is None or form.splits == 1:  # rounded once, here, as its reader would
            out = x.new_empty(1, rows, outputs)
            self._write(x, out, self._linear.bias, overlap=overlap)
            return Parts(out)
        values = torch.empty(form.splits, rows, outputs, dtype=torch.float32, device=x.device)
        self._write(x, values, None, overlap=overlap)
        return Parts(values, self._linear.bias)

    def _write(self, x: Tensor, out: Tensor, bias: Tensor | None, *, overlap: bool) -> None:
        """x (T, columns) -> out (splits, T, outputs)."""
        ordered = self._ordered(x)
        for first, part in self._parts:
            rows = slice(first, first + part.shape[0])
            own_bias = None if bias is None else bias[rows]
            if isinstance(part, DensePart):
                out[0, :, rows] = F.linear(x, part.weight, own_bias)
                continue
            form = form_for(x.dtype, x.shape[0], part, is_paired=False, can_split=len(out) > 1)
            if isinstance(form, WarpTiles):
                packed_rows(ordered, part, out, form, first_output=first, bias=own_bias, overlap=overlap)
            elif isinstance(form, RowBlocks):
                packed_tiles(ordered, part, out, form, first_output=first, bias=own_bias, overlap=overlap)
            else:
                _multiply_unpacked(ordered, part, out[0, :, rows], own_bias)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)


def _multiply_unpacked(x: Tensor, part: PackedPart, out: Tensor, bias: Tensor | None) -> None:
    """x (T, columns) -> out (T, outputs), rows of which may lie apart."""
    outputs, columns = part.shape
    tiles_at_once = max(1, UNPACKED_BYTES // (OUTPUTS * columns * x.itemsize))
    for first_tile in range(0, part.numbers.shape[0], tiles_at_once):
        rows = slice(first_tile * OUTPUTS, min((first_tile + tiles_at_once) * OUTPUTS, outputs))
        weight = x.new_empty(rows.stop - rows.start, columns)
        unpack(part, first_tile, weight)
        if out.dtype is not x.dtype:
            whole = _unrounded(x, weight)
            out[:, rows] = whole if bias is None else whole + bias[rows]
        elif bias is None:
            torch.mm(x, weight.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, weight.t(), out=out[:, rows])


def _unrounded(x: Tensor, weight: Tensor) -> Tensor:
    """Their product in float32, as matrix units sum it."""
    if x.device.type == "cuda" and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
