"""What a search for a floor is made of: weights, selection among values in registers, and a slow search.

All of these are parts of the kernels in floors.py and sieve.py: one row, one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.race import COLDEST, LOG2_E

THRESHOLDS = tl.constexpr(16)  # weighed in one read
WEIGHED_AT_ONCE = tl.constexpr(1024)
HALVINGS = tl.constexpr(10)  # of thousands of values: a handful is left


@triton.jit
def rate_of(temperature: tl.tensor) -> tl.tensor:
    """One over the temperature, for powers of two."""
    return LOG2_E / tl.maximum(temperature, COLDEST)


@triton.jit
def masses_of(x: tl.tensor, largest: tl.tensor, rate: tl.tensor) -> tl.tensor:
    """Rounded otherwise than `race.scaled`, by less than a sum is."""
    return tl.exp2((x - largest) * rate)


@triton.jit
def index_of(value: tl.tensor) -> tl.tensor:
    """The index of a float32 in the sorted list of all of them, counted from zero's: int64."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_at(index: tl.tensor) -> tl.tensor:
    bits = index.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low: tl.tensor, top: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """A value above low and up to top, where low < top.

    Halves of values are quickest nearly always; halves of the list of all float32 numbers end every search.
    """
    middle = 0.5 * low + 0.5 * top
    if (turn % 4 == 3) | (middle <= low):
        middle = _float_at((index_of(low) + index_of(top)) >> 1)
    return tl.where((middle > low) & (middle <= top), middle, top)


@triton.jit
def select(
    x: tl.tensor, weights: tl.tensor, low: tl.tensor, top: tl.tensor, above: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """The largest value v of x, low <= v <= top, for which `above` and the weights of all x >= v reach `wanted`.

    low itself is taken to reach it. Values of x are from low to top, or weigh nothing.
    """
    turn = 0
    while low < top:
        middle = middle_of(low, top, turn)
        is_high = x >= middle
        if above + tl.sum(tl.where(is_high, weights, 0.0), axis=0) >= wanted:
            low = tl.min(tl.where(is_high, x, float("inf")), axis=0)
        else:
            top = tl.max(tl.where(is_high, float("-inf"), x), axis=0)
        turn += 1
    return low


@triton.jit
def select_among_many(
    x: tl.tensor, weights: tl.tensor, low: tl.tensor, top: tl.tensor, above: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """As `select`; first halved a few times without asking which values are next to the middle."""
    high = tl.full((), float("inf"), tl.float32)
    for _ in range(HALVINGS):
        middle = 0.5 * low + 0.5 * tl.minimum(high, top)
        is_enough = above + tl.sum(tl.where(x >= middle, weights, 0.0), axis=0) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    low = tl.min(tl.where(x >= low, x, float("inf")), axis=0)
    top = tl.max(tl.where(x < high, x, float("-inf")), axis=0)
    return select(x, weights, low, top, above, wanted)


@triton.jit
def exact_floor(
    logits: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    by_mass: tl.tensor,
    low: tl.tensor,
    wanted: tl.tensor,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """The floor, by reading the row eight times: each cuts the list of all float32 numbers into 17 parts."""
    # By index: it tells 0 from -0, which are as large as each other.
    enough, short = index_of(low), index_of(tl.full((), float("inf"), tl.float32))
    while short - enough > 1:
        indices = enough + (short - enough) * (tl.arange(0, THRESHOLDS) + 1) // (THRESHOLDS + 1)
        is_enough = weigh(logits, _float_at(indices), largest, rate, by_mass, vocab_size) >= wanted
        short = tl.min(tl.where(is_enough, short, indices), axis=0)
        enough = tl.max(tl.where(is_enough, indices, enough), axis=0)
    return _float_at(enough)


@triton.jit
def weigh(
    logits: tl.tensor,
    thresholds: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    by_mass: tl.tensor,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """How much of a row reaches each threshold: (THRESHOLDS,)."""
    lanes = tl.arange(0, WEIGHED_AT_ONCE)
    reached = tl.zeros((THRESHOLDS, WEIGHED_AT_ONCE), tl.float32)
    for start in range(0, vocab_size, WEIGHED_AT_ONCE):
        ids = start + lanes
        x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = tl.where(ids < vocab_size, tl.where(by_mass, masses_of(x, largest, rate), 1.0), 0.0)
        reached += tl.where(x[None, :] >= thresholds[:, None], weights[None, :], 0.0)
    return tl.sum(reached, axis=1)
