"""A product still in parts: its reader adds them up, in their order, which saves a kernel that only adds."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Parts(NamedTuple):
    """values (parts, T, outputs), usually float32, a bias (outputs,) that is not in them yet, or None."""

    values: Tensor
    bias: Tensor | None = None

    @classmethod
    def whole(cls, product: Tensor) -> Parts:
        """(T, outputs): one part, nothing to add."""
        return cls(product[None])


@triton.jit
def sum_of_parts(  # type: ignore[no-untyped-def]
    source, part_stride, bias, inside, dtype: tl.constexpr, num_parts: tl.constexpr, has_bias: tl.constexpr
):
    """Parts at source, source + part_stride, ... and the bias, added in float32 and rounded once, as a product is."""
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, num_parts):
        total += tl.load(source + part * part_stride, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype)
