"""A weight that multiplies, in the form that is fastest for the number of rows.

On a CPU the form of a float32 product matters more than anything around it. All products of one step of the default
model, in ms on two cores, Intel Xeon (AVX-512) / AMD EPYC (AVX2) / AMD EPYC (AVX-512):

    rows                            1            8             32            64             128          1,024
    linear(x, w)                    30 / 37 / 48 81 / 123 / 59 129 / - / 94  127 / 260 / 138 152 / - / 234 - / - / 1,737
    transposed: (w @ x.T).T, a view 29 / - / 49  47 / 45 / 41  67 / - / 78   126 / 127 / 122 155 / - / 212 - / - / 1,674
    w in two halves, batched        60 / 21 / 17 49 / - / 41   69 / - / 78   105 / - / 122   171 / - / 211 - / - / 1,756
    a copy packed by oneDNN         - / - / 24   - / - / 25    - / - / 51    - / - / 91      - / - / 167   - / - / 1,400

MKL takes other paths on Intel's processors than elsewhere, so vendor and instruction set decide, and not a measurement
at start-up: runs must repeat, and timings on a shared machine do not.

oneDNN's copy is made when it is first needed and again after the weight was written to. It doubles the weights'
memory, so only models that are small for the machine have one.

Kernels of our own (cpu/) hold weights in a form of theirs instead: then `weight` has a shape and no memory, and `parts`
are all there is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.models.gguf_quants import QuantFormat
from ramify.models.memory import total_memory
from ramify.models.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class _Forms:
    """For which numbers of rows each form is the fastest; the first that says so is taken, else `linear`."""

    halves: range = range(0)
    packed: range = range(0)
    transposed: range = range(0)


_ANY = sys.maxsize
_INTEL = _Forms(transposed=range(4, 57))
_AMD_AVX2 = _Forms(halves=range(1, 2), transposed=range(2, 128))
_AMD_AVX512 = _Forms(halves=range(1, 2), packed=range(3, _ANY), transposed=range(2, _ANY))

PACKED_FOR_ROWS = 64  # oneDNN's layout depends on it, but is the same from 8 to 1,024
SHARE_OF_MEMORY = 4  # a model of up to 1 / SHARE_OF_MEMORY of the machine's memory may be kept twice


class Packed(Protocol):
    """Some rows of a weight, in the form of whoever packed them."""

    @property
    def stored_in(self) -> QuantFormat: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""

    @property
    def num_bytes(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """int64 (T,) -> these rows as float32 (T, columns)."""


class Packing(Protocol):
    """Whoever packs weights."""

    def pack(self, weight: StoredTensor) -> Packed: ...


class Linear:
    """weight (rows, columns), perhaps a bias (rows,); uninitialised until filled."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.parts: dict[int, Packed] = {}  # by their first row
        self.times_packed = 0  # so that whoever keeps addresses of parts notices new ones
        self.may_pack = False  # whether memory allows a second copy
        self._packed: Tensor | None = None
        self._packed_version = -1

    @classmethod
    def empty(
        cls, rows: int, columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device, packed: bool = False
    ) -> Linear:
        weight = torch.empty(rows, columns, dtype=dtype, device="meta" if packed else device)
        return cls(weight, torch.empty(rows, dtype=dtype, device=device) if bias else None)

    def put(self, first_row: int, weight: StoredTensor, packing: Packing) -> None:
        """Fills some rows of a weight that is held packed."""
        self.parts[first_row] = packing.pack(weight)
        self.times_packed += 1

    def drop(self) -> None:
        """Forgets what is packed, and second copies."""
        self.parts, self._packed = {}, None
        self.times_packed += 1

    def product(self, x: Tensor) -> Tensor:
        """(T, columns) -> (T, rows), in whatever memory order came out fastest."""
        if x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        count, weight, forms = x.shape[0], self.weight, _forms()
        if count in forms.halves and weight.shape[0] % 2 == 0:
            transposed = _in_halves(x, weight)
        elif self.may_pack and count in forms.packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._pack(), self.bias, "none", [], "")
            return packed
        elif count in forms.transposed:
            transposed = weight @ x.t()  # (rows, T)
        else:
            return F.linear(x, weight, self.bias)
        if self.bias is not None:
            transposed += self.bias[:, None]
        return transposed.t()

    def _pack(self) -> Tensor:
        # torch counts the writes to a tensor and its views, so weights loaded in place are noticed.
        if self._packed is None or self._packed_version != self.weight._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_FOR_ROWS)
            self._packed_version = self.weight._version
        return self._packed


def may_pack(weight: Tensor, num_bytes: int) -> bool:
    """Whether weights like this one, num_bytes in all, may have a second copy, packed by oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and not weight.is_inference()  # writes to it would not be counted
        and num_bytes <= total_memory() // SHARE_OF_MEMORY
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _in_halves(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return torch.bmm(weight.view(2, rows // 2, columns), x.t().expand(2, columns, 1)).view(rows, 1)


@cache
def _forms() -> _Forms:
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        is_intel = False
    if is_intel:
        return _INTEL
    return _AMD_AVX512 if torch.backends.cpu.get_cpu_capability() == "AVX512" else _AMD_AVX2
