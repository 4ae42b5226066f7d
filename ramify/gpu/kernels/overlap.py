"""Kernels that start while the preceding one still runs (programmatic dependent launch, on Hopper and later).

    kernel n      |== start_next ========= writes ==|
    kernel n + 1        |== start_next, reads weights ..... wait_for_last == reads what n wrote =====|

Every kernel of a chain calls `start_next` at once, and `wait_for_last` before it touches anything that another kernel
writes or reads. The wait lasts until the preceding kernel has ended. Every program waits, even one that finds nothing
to do: only then does the end of a kernel mean that all kernels before it have ended too. What nobody in the chain
writes (weights, the step's lists and positions) may be read before the wait. A kernel launched without the option, such
as torch's own, waits for all before it: a chain begins with one.

Not every kernel gains by starting early. One that was measured to lose starts when the preceding one has ended
(`early=False`), and still lets the next one start early.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = 128  # bytes of memory that come together


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(overlap: bool, *, early: bool = True) -> dict[str, bool]:
    """Keyword arguments of a launch; the interpreter knows no such option."""
    return {"OVERLAP": True, "launch_pdl": early} if overlap else {"OVERLAP": False}


@triton.jit
def start_next(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAP:
        gdc_wait()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Brings the lines of memory at these pointers into the cache, for reads after the wait; where kernels overlap."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
