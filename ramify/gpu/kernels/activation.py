"""SiLU of the gate times the up projection, both halves of one product.

gate_up (T, 2 * I)   [ gate | up ]   ->   out (T, I)   silu(gate) * up
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024


def silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """gate_up (T, 2 * I) -> out (T, I)."""
    rows, inner = out.shape
    _silu_and_multiply[(rows, triton.cdiv(inner, WIDTH))](
        gate_up, out, gate_up.stride(0), out.stride(0), inner=inner, width=WIDTH, num_warps=4
    )


@triton.jit
def _silu_and_multiply(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    inner: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = columns < inner
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * gate_up_stride + inner + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two steps, as torch's own operators do.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(
        out + row * out_stride + columns, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside
    )
