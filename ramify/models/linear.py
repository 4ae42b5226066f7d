"""A weight that multiplies, in the form that is fastest for the number of rows.

On a CPU the form of a float32 product matters more than anything around it. All products of one step of the default
model, in ms on two cores, Intel Xeon (AVX-512) / AMD EPYC (AVX2):

    rows                            1          8           32         48         64           128
    linear(x, w)                    30 / 37    81 / 123    129 / -    181 / -    127 / 260    152 / -
    turned: (w @ x.T).T, a view     29 / -     47 / 45     67 / -     86 / -     126 / 127    155 / -
    w in two halves, batched        60 / 21    49 / -      69 / -     - / -      105 / -      171 / -

MKL takes other paths on Intel's processors than elsewhere, so the vendor decides, and not a measurement at start-up:
runs must repeat, and timings on a shared machine do not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """weight (rows, columns), perhaps a bias (rows,); uninitialised until filled."""

    def __init__(self, rows: int, columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def product(self, x: Tensor) -> Tensor:
        """(T, columns) -> (T, rows), in whatever memory order came out fastest."""
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, columns) times weight (rows, columns), transposed: (T, rows), in whatever memory order came out fastest."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    count = x.shape[0]
    if count == 1 and not _is_intel() and weight.shape[0] % 2 == 0:
        turned = _in_halves(x, weight)
    elif count in (_TURNED_ON_INTEL if _is_intel() else _TURNED_ELSEWHERE):
        turned = weight @ x.t()  # (rows, T)
    else:
        return F.linear(x, weight, bias)
    if bias is not None:
        turned += bias[:, None]
    return turned.t()


_TURNED_ON_INTEL = range(4, 57)
_TURNED_ELSEWHERE = range(2, 128)


def _in_halves(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return torch.bmm(weight.view(2, rows // 2, columns), x.t().expand(2, columns, 1)).view(rows, 1)


@cache
def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
