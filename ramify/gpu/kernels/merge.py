"""The parts of a row become one: exact, by log-sum-exp, in float32.

    part       first .. first + count
    lse          l0   l1   l2            peak = max l
    weight     e^(l - peak)              a part that saw nothing has l = -inf and weighs nothing
    output     sum(weight * partial) / sum(weight), in the model's dtype; zeros for a row without parts (padding)

Parts are merged in their order, PARTS at a time, so the result does not depend on the batch; with `exact`, one by one,
as every other exact kernel folds them (walk.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.walk import EXACT_OPTIONS, begin, fold, whole

PARTS = 8  # merged at a time
NUM_WARPS = 2


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    partials,
    lse,
    first_part,
    num_parts,
    out,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_part + row).to(tl.int64)
    count = tl.load(num_parts + row)
    dim = tl.arange(0, HEAD_DIM)
    index = tl.arange(0, PARTS)
    output = tl.zeros([HEAD_DIM], dtype=tl.float32)
    total = 0.0
    peak = float("-inf")
    for at in range(0, count, PARTS):
        inside = at + index < count
        source = (first + at + index) * HEADS + head
        score = tl.load(lse + source, mask=inside, other=float("-inf"))
        part = tl.load(partials + source[:, None] * HEAD_DIM + dim[None, :], mask=inside[:, None], other=0.0)
        part = tl.where((score == float("-inf"))[:, None], 0.0, part)  # nothing times NaN would be NaN
        new_peak = tl.maximum(peak, tl.max(score, 0))
        # Nothing seen so far: any finite number keeps -inf minus -inf from being NaN.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp(score - level)
        shrink = tl.exp(peak - level)
        output = output * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        peak = new_peak
    # NaN, a fault of the model, is not 0 and stays visible.
    output = output / tl.where(total == 0, 1.0, total)
    tl.store(out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dim, output.to(out.dtype.element_ty))


@triton.jit
def _merge_exactly(  # type: ignore[no-untyped-def]
    partials, lse, first_part, num_parts, out, out_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_part + row).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    output, total, peak = begin(1, HEAD_DIM)
    for part in tl.range(0, tl.load(num_parts + row), loop_unroll_factor=4):
        source = (first + part) * HEADS + head + tl.arange(0, 1)
        score = tl.load(lse + source)
        values = tl.load(partials + source[:, None] * HEAD_DIM + dim)
        output, total, peak = fold(output, total, peak, values, score)
    target = out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dim
    tl.store(target, whole(output, total).to(out.dtype.element_ty))


def merge(
    partials: Tensor,
    lse: Tensor,
    first_part: Tensor,
    num_parts: Tensor,
    out: Tensor,
    /,
    *,
    exact: bool = False,
    parts: int = PARTS,
    num_warps: int = NUM_WARPS,
) -> None:
    """partials float32 (parts, heads, head_dim), lse float32 (parts, heads), first_part and num_parts int32 (at least
    as many as out has rows); writes out (rows, heads * head_dim), each row contiguous."""
    _, heads, head_dim = partials.shape
    if exact:
        _merge_exactly[(out.shape[0], heads)](
            partials,
            lse,
            first_part,
            num_parts,
            out,
            out.stride(0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            num_warps=num_warps,
            **EXACT_OPTIONS,
        )
        return
    _merge[(out.shape[0], heads)](
        partials,
        lse,
        first_part,
        num_parts,
        out,
        out.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        PARTS=parts,
        num_warps=num_warps,
    )
