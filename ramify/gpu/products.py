"""How a weight multiplies on a GPU: by cuBLAS or a kernel of our own, in the form that its `Forms` chooses.

A product of few rows is bound by reading its weight, and cuBLAS reads at 2.3 to 3 TB/s where an H200 copies at 4.3.
Which form is the fastest is measured once for the shapes at hand (tuning.py) and remembered, so that runs repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from ramify.gpu.form_cache import FormCache
from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.ahead import Ahead
from ramify.gpu.kernels.copied_product import CopiedTiles, copied_gate_up, copied_product
from ramify.gpu.kernels.norm import add_rms_norm
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.row_product import Norm, RowTiles, row_gate_up, row_product
from ramify.gpu.kernels.row_stream import RowStream, row_stream
from ramify.gpu.kernels.tile_stream import TileStream, stream_gate_up, tile_stream
from ramify.gpu.kernels.tiled_product import Tiles, tiled_gate_up, tiled_product
from ramify.gpu.product_candidates import Chip
from ramify.gpu.product_forms import (
    LEAST_SHARED_MEMORY,
    MIB,
    Form,
    Forms,
    FormsByRule,
    OneForm,
    OneRowForm,
    Pace,
    Product,
    Role,
    Vendor,
)
from ramify.gpu.tuning import GraphStopwatch, MeasuredForms, Trial
from ramify.models.linear import Linear

TRIAL_BYTES = 500_000_000  # of weights: eight times the cache of an H200


class Stream:
    """The residual stream (T, hidden), and what the last product adds to it before it is next read.

    pace: of the kernels that read or write it; they overlap where the device can, if it is not said.
    """

    def __init__(self, values: Tensor, pace: Pace | None = None) -> None:
        self._values = values
        self.pace = pace or Pace(int(can_overlap(values.device)))
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
    def overlap(self) -> bool:
        return bool(self.pace.overlaps)

    @property
    def num_rows(self) -> int:
        return self._values.shape[0]

    def add(self, delta: Parts) -> None:
        assert self._pending is None, "what was added before is taken in by the norm between"
        self._pending = delta

    def normed(self, norm: Norm) -> Tensor:
        """Takes in what is pending; returns the norm (T, hidden), in memory that the next one will overwrite."""
        add_rms_norm(self._values, self._pending, norm.weight, norm.eps, self._normed, overlap=self.overlap)
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

    def ahead(self, rows: int, pace: Pace) -> Ahead | None:
        """What a product of so many rows reads first of gate over up, as much as is asked for ahead."""


class DenseWeight:
    """A weight as it is in memory: the one place where kernels see its tensor.

    One row, where starting a kernel takes as long as its work, has norms and residual adds done by the products
    themselves (OneRowForm); in any other form a product may be left in parts, which whoever reads it adds up.
    """

    def __init__(self, linear: Linear, forms: Forms) -> None:
        self._linear = linear
        self._forms = forms

    def from_stream(self, stream: Stream, norm: Norm) -> Parts:
        form = self._form(stream.num_rows, stream.pace)
        if not isinstance(form, OneRowForm):
            return self._product(stream.normed(norm), form, overlap=stream.overlap)
        out = stream.values.new_empty(1, self._linear.weight.shape[0])
        self._row_product(stream.values, out, form, norm=norm, overlap=stream.overlap)
        return Parts.whole(out)

    def gated_from_stream(self, stream: Stream, norm: Norm, out: Tensor) -> None:
        form, overlap = self._form(stream.num_rows, stream.pace), stream.overlap
        weight, bias = self._linear.weight, self._linear.bias
        if isinstance(form, RowTiles):
            row_gate_up(stream.values, weight, out, tiles=form, bias=bias, norm=norm, overlap=overlap)
            return
        if isinstance(form, RowStream):
            row_stream(stream.values, weight, out, tiles=form, bias=bias, norm=norm, is_paired=True, overlap=overlap)
            return
        x = stream.normed(norm)
        if isinstance(form, Tiles):
            _gate_up(form)(x, weight, out, form, bias=bias, overlap=overlap)
        else:
            silu_and_multiply(self._linear.product(x).contiguous(), out)

    def into_stream(self, x: Tensor, stream: Stream) -> None:
        form = self._form(x.shape[0], stream.pace)
        if isinstance(form, OneRowForm):
            self._row_product(x, stream.values, form, adds=True, overlap=stream.overlap)
        else:
            stream.add(self._product(x, form, overlap=stream.overlap))

    def logits(self, x: Tensor, out: Tensor) -> None:
        form, weight, overlap = self._forms.of(x.shape[0]), self._linear.weight, can_overlap(x.device)
        if isinstance(form, OneRowForm):
            self._row_product(x, out, form, overlap=overlap)
        elif isinstance(form, Tiles):
            _multiply(form)(x, weight, out[None], form, overlap=overlap)
        elif x.device.type == "cuda" and x.dtype is not torch.float32:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            out.copy_(self._linear.product(x))

    def ahead(self, rows: int, pace: Pace) -> Ahead | None:
        if not pace.asks_ahead:
            return None
        by_row = not isinstance(self._form(rows, pace), OneRowForm)
        return Ahead.of(self._linear.weight, pace.asks_ahead * MIB, by_row=by_row)

    def _form(self, rows: int, pace: Pace) -> Form:
        return self._forms.of(rows, stays=pace.stays(self._linear.weight))

    def _product(self, x: Tensor, form: Tiles | Vendor, *, overlap: bool) -> Parts:
        """(T, columns) -> parts of (T, outputs)."""
        if isinstance(form, Vendor):
            return Parts.whole(self._linear.product(x).contiguous())
        weight, bias = self._linear.weight, self._linear.bias
        rows, outputs = x.shape[0], weight.shape[0]
        if form.splits == 1:  # rounded once, here, as its reader would
            whole = x.new_empty(1, rows, outputs)
            _multiply(form)(x, weight, whole, form, bias=bias, overlap=overlap)
            return Parts(whole)
        values = torch.empty(form.splits, rows, outputs, dtype=torch.float32, device=x.device)
        _multiply(form)(x, weight, values, form, overlap=overlap)
        return Parts(values, bias)

    def _row_product(
        self,
        x: Tensor,
        out: Tensor,
        tiles: OneRowForm,
        *,
        norm: Norm | None = None,
        adds: bool = False,
        overlap: bool,
    ) -> None:
        weight, bias = self._linear.weight, self._linear.bias
        if isinstance(tiles, RowStream):
            row_stream(x, weight, out, tiles=tiles, bias=bias, norm=norm, adds=adds, overlap=overlap)
        else:
            row_product(x, weight, out, tiles=tiles, bias=bias, norm=norm, adds=adds, overlap=overlap)


def _multiply(form: Tiles) -> Callable[..., None]:
    kinds: dict[type[Tiles], Callable[..., None]] = {CopiedTiles: copied_product, TileStream: tile_stream}
    return kinds.get(type(form), tiled_product)


def _gate_up(form: Tiles) -> Callable[..., None]:
    kinds: dict[type[Tiles], Callable[..., None]] = {CopiedTiles: copied_gate_up, TileStream: stream_gate_up}
    return kinds.get(type(form), tiled_gate_up)


def dense_weights(role: Role, linears: Sequence[Linear], cache: FormCache | None) -> list[Weight]:
    """Weights of one role and shape, one a layer; with a cache, their forms are measured."""
    if not linears:
        return []
    weight = linears[0].weight
    outputs, columns = weight.shape
    product = Product(role, outputs, columns, weight.dtype)
    forms: Forms = FormsByRule(product, shared_memory_of(weight.device), weight.device.type == "cpu")
    if cache is not None:
        forms = MeasuredForms(
            product, Chip.of(weight.device), cache, partial(trial_of, product, linears), GraphStopwatch(weight.device)
        )
    return [DenseWeight(linear, forms) for linear in linears]


def trial_of(product: Product, linears: Sequence[Linear], rows: int) -> Trial:
    """As many of these weights as do not fit into the cache together, multiplied as the decoder would."""
    enough = linears[: max(2, -(-TRIAL_BYTES // product.num_bytes))]
    weight = linears[0].weight
    values, read_values = (weight.new_empty(rows, width).normal_() for width in weight.shape[::-1])
    norm, reader_norm = (Norm(weight.new_ones(width), 1e-6) for width in weight.shape[::-1])
    x = weight.new_empty(rows, product.columns).normal_()
    gated = weight.new_empty(rows, product.tiled_outputs)
    logits = torch.empty(rows if product.role == "head" else 0, product.outputs, device=weight.device)

    def launch(form: Form) -> None:
        stream, reader = Stream(values), Stream(read_values)  # its own: several forms are compiled at a time
        for linear in enough:
            own = DenseWeight(linear, OneForm(form))
            if product.role == "gate_up":
                own.gated_from_stream(stream, norm, gated)
            elif product.role == "head":
                own.logits(x, logits)
            elif product.role == "added":
                own.into_stream(x, reader)
                if not isinstance(form, OneRowForm):
                    reader.normed(reader_norm)
            else:
                parts = own.from_stream(stream, norm)
                if not isinstance(form, OneRowForm):
                    reader.add(parts)
                    reader.normed(reader_norm)

    return launch


@cache
def shared_memory_of(device: torch.device) -> int:
    """What a program may take, in bytes; where kernels are interpreted, as little as anywhere."""
    if device.type != "cuda":
        return LEAST_SHARED_MEMORY
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
