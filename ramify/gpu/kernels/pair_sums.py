"""The sums of two models' logits, theta and teacher, that their mixture is made of; `sampling/pair.py` says why these.

A row is split over several programs. Each leaves sums relative to the largest exponent among its own ids, and whoever
needs those of the whole row merges them:

    column       TOP       TOTAL    MEAN    SQUARE    RISE    RISE_SQUARE
    a sum        largest   Σ e
    a log-sum    largest   Σ e      Σ e d
    moments      largest   Σ e      Σ e d   Σ e d²    Σ e d   Σ e d²        the last two over d > 0 alone

Numbers of a row are float64, and so is the log-ratio until it is rounded once. Kernels sum `ratio`, which is d + rest,
in place of d.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_SUMS = tl.constexpr(16)  # what a split has room for
TOP, TOTAL, MEAN, SQUARE, RISE, RISE_SQUARE = map(tl.constexpr, range(6))
SUM = tl.constexpr(2)  # columns
LOG_SUM = tl.constexpr(3)


# -- ids ---------------------------------------------------------------------------------------------------------


@triton.jit
def load(theta: tl.tensor, teacher: tl.tensor, ids: tl.tensor, vocab_size: tl.constexpr) -> tl.tensor:
    """Logits of both, and whether both allow the token."""
    s = tl.load(theta + ids, mask=ids < vocab_size, other=float("-inf"))
    t = tl.load(teacher + ids, mask=ids < vocab_size, other=float("-inf"))
    return s, t, (s > float("-inf")) & (t > float("-inf"))


@triton.jit
def log_ratio(s: tl.tensor, t: tl.tensor, both: tl.tensor, centre: tl.tensor) -> tl.tensor:
    return tl.where(both, (t.to(tl.float64) - s.to(tl.float64) - centre).to(tl.float32), 0.0)


@triton.jit
def exponents(base: tl.tensor, ratio: tl.tensor, both: tl.tensor, beta: tl.tensor) -> tl.tensor:
    """Of π_θ e^(β d): base is theta less its row's largest."""
    return tl.where(both, base + beta.to(tl.float32) * ratio, float("-inf"))


@triton.jit
def exact_exponents(s: tl.tensor, t: tl.tensor, both: tl.tensor, alpha: tl.tensor) -> tl.tensor:
    """(1 − α) s + α t in float64: the two may be hundreds, and their sum near nothing."""
    x = (1.0 - alpha) * tl.where(both, s, 0.0).to(tl.float64) + alpha * tl.where(both, t, 0.0).to(tl.float64)
    return tl.where(both, x, float("-inf"))


# -- sums of a split, with more ids added ------------------------------------------------------------------------


@triton.jit
def _finite(largest: tl.tensor) -> tl.tensor:
    """What exponents are measured from: the largest, or 0 while nothing has been seen."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def sum_of(x: tl.tensor) -> tl.tensor:
    return tl.sum(x, axis=0).to(tl.float64)


@triton.jit
def exponentials(largest: tl.tensor, x: tl.tensor, inside: tl.tensor):  # type: ignore[no-untyped-def]
    """The largest exponent, x included; e^x relative to it; and the factor that makes earlier sums relative to it."""
    following = tl.maximum(largest, tl.max(x, axis=0).to(tl.float64))
    e = tl.where(inside, tl.exp((x - _finite(following).to(x.dtype)).to(tl.float32)), 0.0)
    return following, e, tl.exp(largest - _finite(following))


@triton.jit
def extend_log_sum(largest, total, mean, x, ratio, inside):  # type: ignore[no-untyped-def]
    largest, e, keep = exponentials(largest, x, inside)
    return largest, total * keep + sum_of(e), mean * keep + sum_of(e * ratio)


@triton.jit
def extend_moments(largest, total, mean, square, rise, rise_square, x, ratio, inside):  # type: ignore[no-untyped-def]
    largest, e, keep = exponentials(largest, x, inside)
    weighted = e * ratio
    up = tl.maximum(weighted, 0.0)
    total, mean = total * keep + sum_of(e), mean * keep + sum_of(weighted)
    square = square * keep + sum_of(weighted * ratio)
    rise, rise_square = rise * keep + sum_of(up), rise_square * keep + sum_of(up * ratio)
    return largest, total, mean, square, rise, rise_square


@triton.jit
def store_log_sum(out, largest, total, mean):  # type: ignore[no-untyped-def]
    tl.store(out + TOP, largest)
    tl.store(out + TOTAL, total)
    tl.store(out + MEAN, mean)


@triton.jit
def store_moments(out, largest, total, mean, square, rise, rise_square):  # type: ignore[no-untyped-def]
    store_log_sum(out, largest, total, mean)
    tl.store(out + SQUARE, square)
    tl.store(out + RISE, rise)
    tl.store(out + RISE_SQUARE, rise_square)


# -- sums of a row -----------------------------------------------------------------------------------------------


@triton.jit
def column(sums, index: tl.constexpr, splits: tl.constexpr, width: tl.constexpr, other: tl.constexpr):  # type: ignore[no-untyped-def]
    """One column of a row's sums, a number from every split: (width,). `sums` points at the row's first number."""
    parts = tl.arange(0, width)
    return tl.load(sums + parts * NUM_SUMS + index, mask=parts < splits, other=other)


@triton.jit
def merge(sums, first: tl.constexpr, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of sums that begin at column `first`: the largest exponent of all, Σ e relative to it, and the factors (width,)
    that make the splits' sums relative to it."""
    each = column(sums, first + TOP, splits, width, float("-inf"))
    largest = tl.max(each, axis=0)
    scales = tl.where(each > float("-inf"), tl.exp(each - _finite(largest)), 0.0)
    return largest, add_up(sums, first + TOTAL, scales, splits, width), scales


@triton.jit
def add_up(sums, index: tl.constexpr, scales, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(scales * column(sums, index, splits, width, 0.0), axis=0)


@triton.jit
def merge_moments(sums, rest, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """log Σ e, and of d: the mean, the mean square, and the parts of both with d > 0."""
    largest, total, scales = merge(sums, TOP, splits, width)
    mean = add_up(sums, MEAN, scales, splits, width) / total - rest
    square = add_up(sums, SQUARE, scales, splits, width) / total
    rise = add_up(sums, RISE, scales, splits, width) / total
    rise_square = add_up(sums, RISE_SQUARE, scales, splits, width) / total
    return largest + tl.log(total), mean, square, rise, rise_square


@triton.jit
def log_add(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """log(e^a + e^b)"""
    largest = _finite(tl.maximum(a, b))
    return largest + tl.log(tl.exp(a - largest) + tl.exp(b - largest))
