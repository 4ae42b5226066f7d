"""Weights on their way into the second cache while attention is at work.

    gate over up     | first ......|..................| first ......|..................|
                       asked for                        asked for                        together `num_bytes`
    by row           | f... | f... | f... | f... | f... | f... | f... | f... |

Where rows are few, attention takes many times as long as its bytes would: one thing in it waits for another, and the
memory is idle meanwhile. What the largest product of the layer will read first is asked for then, by the copy engine,
which no thread waits for. Programs that walk over a weight one after the other read it from the beginning of each half;
tiles that are all at work at once read the beginning of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import LINE

PIECE = 4096  # bytes that are asked for at once, where they need not be fewer
ALIGNED = 16  # bytes: what the copy engine takes


@dataclass(frozen=True, slots=True)
class Ahead:
    """`count` stretches of `length` numbers of a tensor, `stride` apart, and as many from its middle on."""

    tensor: Tensor
    count: int
    stride: int
    length: int

    @classmethod
    def of(cls, tensor: Tensor, num_bytes: int, *, by_row: bool) -> Ahead | None:
        """About so many bytes of gate over up; None where rows lie as the copy engine cannot read them."""
        size, row = tensor.itemsize, tensor.stride(0)
        rows, share = tensor.shape[0] // 2, num_bytes // 2 // size
        if not tensor.is_contiguous() or row * size % ALIGNED or tensor.shape[0] % 2:
            return None
        if by_row:
            length = min(row, max(1, share // rows * size // LINE) * LINE // size)
            return cls(tensor, rows, row, length)
        length = min(PIECE // size, row)
        return cls(tensor, min(share, rows * row) // length, length, length)

    @property
    def to_half(self) -> int:
        return self.tensor.numel() // 2


@triton.jit
def ask_ahead(tensor, count, stride, length, to_half, number, programs, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks for the share of program `number`, one stretch a thread at a time. stride, length: in numbers."""
    size: tl.constexpr = tensor.dtype.element_ty.primitive_bitwidth // 8
    for first in range(number * THREADS, 2 * count, programs * THREADS):
        stretch = first + tl.arange(0, THREADS)
        place = (stretch // 2).to(tl.int64) * stride + (stretch % 2).to(tl.int64) * to_half
        num_bytes = tl.where(stretch < 2 * count, length * size, 0)
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred is_there;
                setp.ne.s32 is_there, $2, 0;
                @is_there cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [tensor + place, num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
