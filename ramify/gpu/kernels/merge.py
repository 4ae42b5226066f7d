"""The parts of each row become its output, where two kernels wrote them side by side (own_parts.py).

    row    | shared | shared | own |   each an output vector per head, and the log-sum-exp of its scores
              \\________|_______/
                  out[row]

Rows without parts are padding: they come to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.parts_of_rows import merged

HEADS_AT_ONCE = 4
NUM_WARPS = 4


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    partials,
    lse,
    first_part,
    num_parts,
    taken,
    out,
    out_stride,
    HEADS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    real = head < HEADS
    dim = tl.arange(0, HEAD_DIM)[None, :]
    count = tl.load(num_parts + row)
    first = tl.load(first_part + row).to(tl.int64) * HEADS + head
    wait_for_last(OVERLAP)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(taken, 0)
    output = tl.zeros([HEADS_AT_ONCE, HEAD_DIM], dtype=tl.float32)
    if count > 0:
        output = merged(partials, lse, first, count, real, HEADS, HEADS_AT_ONCE, HEAD_DIM, EXACT=False)
    target = out + row * out_stride + head[:, None] * HEAD_DIM + dim
    tl.store(target, output.to(out.dtype.element_ty), mask=real[:, None])


def merge(
    partials: Tensor,
    lse: Tensor,
    first_part: Tensor,
    num_parts: Tensor,
    taken: Tensor,
    out: Tensor,
    /,
    *,
    overlap: bool = False,
) -> None:
    """partials (parts, heads, head_dim) and lse (parts, heads) in float32, int32 first_part and num_parts of each row
    -> out (rows, heads * head_dim). taken (1,) is 0 afterwards. With `overlap` the lists of parts were complete before
    the preceding kernel began."""
    _, heads, head_dim = partials.shape
    _merge[(out.shape[0], triton.cdiv(heads, HEADS_AT_ONCE))](
        partials,
        lse,
        first_part,
        num_parts,
        taken,
        out,
        out.stride(0),
        HEADS=heads,
        HEADS_AT_ONCE=HEADS_AT_ONCE,
        HEAD_DIM=head_dim,
        num_warps=NUM_WARPS,
        **launch_options(overlap),
    )
