"""A weight packed for multiplication: panels of as many outputs as a tile of registers holds.

weight (outputs, depth) -> panels (outputs / C, depth, C), C = 64 with AVX-512, 16 with AVX2; the last is padded with
zeros. Panels are read one after the other from end to end, whatever the number of rows, and each element of a product
is summed in the order of depth: a row's result does not depend on the rows beside it.

A gated weight (gate's rows, then up's) has C / 2 outputs of gate and C / 2 of up in each panel, so that one tile holds
all that silu(gate) * up needs.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ramify.cpu.library import Library
from ramify.models.linear import Linear


class Ending(IntEnum):
    """What becomes of a product; as in products.cpp."""

    PLAIN = 0
    ADD = 1  # to what the output holds
    GATED = 2  # silu(first half) * second half


class PackedLinear:
    """A linear layer's weight in panels, packed again when it was written to."""

    def __init__(self, library: Library, linear: Linear, *, gated: bool = False) -> None:
        self._library = library
        self._linear = linear
        self._gated = gated
        outputs, self._depth = linear.weight.shape
        self._columns = outputs // 2 if gated else outputs
        width = library.tile_columns // 2 if gated else library.tile_columns
        self._num_panels = -(-self._columns // width)
        self._panels: Tensor | None = None
        self._bias: Tensor | None = None
        self._versions = (-1, -1)

    def pack(self) -> None:
        """Now, rather than when it is first multiplied."""
        self._packed()

    def multiply(self, x: Tensor, out: Tensor, ending: Ending = Ending.PLAIN) -> None:
        """x (T, depth) dense -> out (T, outputs) dense."""
        assert x.is_contiguous(), "rows of x must lie one after the other"
        assert out.is_contiguous(), "rows of the output must lie one after the other"
        assert (x.shape[1], out.numel()) == (self._depth, len(x) * self._columns), "x or the output is of another shape"
        assert (ending is Ending.GATED) == self._gated, "a gated weight is packed for that ending alone"
        panels, bias = self._packed()
        self._library.multiply_packed(
            x.data_ptr(),
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            self._depth,
            self._columns,
            self._num_panels,
            ending,
            torch.get_num_threads(),
        )

    def _packed(self) -> tuple[Tensor, Tensor | None]:
        # torch counts the writes to a tensor and its views, so weights loaded in place are noticed.
        weight, bias = self._linear.weight, self._linear.bias
        versions = (weight._version, -1 if bias is None else bias._version)
        if self._panels is None or versions != self._versions:
            self._panels = self._pack(weight)
            self._bias = None if bias is None else self._pack(bias[:, None]).flatten()
            self._versions = versions
        return self._panels, self._bias

    def _pack(self, weight: Tensor) -> Tensor:
        """(outputs, depth) -> (panels, depth, columns of a tile)"""
        outputs, depth = weight.shape
        dense = weight.contiguous()  # held until it has been read
        panels = torch.empty(self._num_panels, depth, self._library.tile_columns)
        self._library.pack(
            dense.data_ptr(),
            panels.data_ptr(),
            outputs,
            depth,
            self._num_panels,
            self._gated,
            torch.get_num_threads(),
        )
        return panels
