"""Residual add and RMS norm in one pass: what a layer adds to the stream, and what the next one reads of it.

residual  +=  delta                 in the model's precision; a product may come in parts, which are added up first
out        =  weight * residual / root mean square, the mean taken in float32
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.parts import Parts, sum_of_parts


def add_rms_norm(
    residual: Tensor, delta: Parts | None, weight: Tensor, eps: float, out: Tensor, *, overlap: bool = False
) -> None:
    """residual (T, H) grows by delta, parts of (T, H), in place; its norm goes to out (T, H). weight is (H,)."""
    rows, hidden = residual.shape
    bias = None if delta is None else delta.bias
    width = triton.next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        residual,
        residual if delta is None else delta.values,
        residual if bias is None else bias,
        weight,
        out,
        residual.stride(0),
        0 if delta is None else delta.values.stride(0),
        0 if delta is None else delta.values.stride(1),
        out.stride(0),
        eps,
        hidden=hidden,
        width=width,
        num_parts=0 if delta is None else delta.values.shape[0],
        has_bias=bias is not None,
        num_warps=_warps(width),
        **launch_options(overlap),
    )


def _warps(width: int) -> int:
    """A thread holds 8 to 16 numbers: enough loads in flight, few registers."""
    return min(max(width // 512, 1), 16)


@triton.jit
def _add_rms_norm(
    residual: tl.tensor,
    delta: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    residual_stride: tl.tensor,
    part_stride: tl.tensor,
    delta_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    num_parts: tl.constexpr,
    has_bias: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    inside = columns < hidden
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_last(OVERLAP)
    x = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    if num_parts > 0:
        change = sum_of_parts(
            delta + row * delta_stride + columns, part_stride, bias + columns, inside, x.dtype, num_parts, has_bias
        )
        x = (x.to(tl.float32) + change.to(tl.float32)).to(x.dtype)  # rounded, as the next layer will read it
        tl.store(residual + row * residual_stride + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normalised = (wide * scale).to(x.dtype).to(tl.float32)
    tl.store(out + row * out_stride + columns, (weights * normalised).to(x.dtype), mask=inside)
