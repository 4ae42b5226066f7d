"""What may be drawn after top-k, top-p and min-p, as an interval of logits; the truth is `sampling/truncation.py`.

    typical_p        a floor and a ceiling around the entropy, the nearest that together reach p
    epsilon_cutoff   a floor: probability >= epsilon
    eta_cutoff       a floor: probability >= min(eta, sqrt(eta) * exp(-entropy))
    top_a            a floor: probability >= a * (the largest probability)^2
    p_less           a floor: probability >= the sum of all squared probabilities
    mirostat         a floor: surprise in bits <= the limit that the row has come to
    xtc              a ceiling: the least likely of those that reach the threshold

Each acts on what the ones before it left, so it begins with a read that sums what lies in the interval. One program
narrows one row, in one fixed order: the interval is the same in every batch. Rows come as `bend` leaves them, with a
largest of 0; one that asks for nothing costs nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.bending import TILE, sums_of
from ramify.gpu.kernels.race import WORD_STEP, KeyWords, philox
from ramify.sampling import draw as truth

COIN_LEVEL = tl.constexpr(truth.COIN_LEVEL)
LOG_2 = tl.constexpr(math.log(2))
THRESHOLDS = tl.constexpr(16)  # distances that one read weighs
WEIGHED_AT_ONCE = 1024


class Cuts(NamedTuple):
    """What rows ask for, (R,) float32 each."""

    typical_p: Tensor  # 1: none
    epsilon: Tensor  # 0: none
    eta: Tensor  # 0: none
    top_a: Tensor  # 0: none
    p_less: Tensor  # 0: none, 1: asked for
    xtc_probability: Tensor  # 0: none
    xtc_threshold: Tensor
    limits: Tensor  # of surprise, in bits; infinite: none


def narrow(bent: Tensor, temperatures: Tensor, cuts: Cuts, keys: KeyWords, floors: Tensor) -> None:
    """Raises floors (R,) of bent logits (R, V), and forbids what lies above a row's ceiling, in place."""
    rows, vocab_size = bent.shape
    tile = min(TILE, triton.next_power_of_2(vocab_size))
    _narrow[(rows,)](
        bent,
        temperatures,
        *cuts,
        *keys,
        floors,
        bent.stride(0),
        vocab_size=vocab_size,
        tile=tile,
        weighed_at_once=min(WEIGHED_AT_ONCE, tile),
        num_warps=8,
    )


@triton.jit
def _narrow(
    bent: tl.tensor,
    temperatures: tl.tensor,
    typical_p: tl.tensor,
    epsilons: tl.tensor,
    etas: tl.tensor,
    top_a: tl.tensor,
    p_less: tl.tensor,
    xtc_probabilities: tl.tensor,
    xtc_thresholds: tl.tensor,
    limits: tl.tensor,
    seeds_low: tl.tensor,
    seeds_high: tl.tensor,
    children: tl.tensor,
    positions: tl.tensor,
    floors: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.constexpr,
    tile: tl.constexpr,
    weighed_at_once: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    bent += row * stride
    typical, epsilon, eta = tl.load(typical_p + row), tl.load(epsilons + row), tl.load(etas + row)
    a, is_p_less = tl.load(top_a + row), tl.load(p_less + row) > 0
    probability = tl.load(xtc_probabilities + row)
    excludes = False
    if probability > 0:
        excludes = _coin(row, seeds_low, seeds_high, children, positions) < probability
    limit = tl.load(limits + row)
    follows = limit < float("inf")
    asks = (typical < 1) | (epsilon > 0) | (eta > 0) | (a > 0) | is_p_less | follows | excludes
    if asks & (tl.load(temperatures + row) > 0):
        floor = tl.load(floors + row)
        ceiling = tl.full((), float("inf"), tl.float32)
        if typical < 1:
            floor, ceiling = _most_typical(bent, floor, typical, vocab_size, tile, weighed_at_once)
        if epsilon > 0:
            _, whole, _, _, top = sums_of(bent, 0.0, floor, ceiling, vocab_size, tile)
            floor = tl.maximum(floor, tl.minimum(top, tl.log(epsilon) + tl.log(whole)))
        if eta > 0:
            _, whole, weighted, _, top = sums_of(bent, 0.0, floor, ceiling, vocab_size, tile)
            entropy = tl.log(whole) - weighted / whole
            least = tl.minimum(tl.log(eta), 0.5 * tl.log(eta) - entropy)
            floor = tl.maximum(floor, tl.minimum(top, least + tl.log(whole)))
        if a > 0:
            _, whole, _, _, top = sums_of(bent, 0.0, floor, ceiling, vocab_size, tile)
            floor = tl.maximum(floor, tl.minimum(top, tl.log(a) + 2.0 * top - tl.log(whole)))
        if is_p_less:
            _, whole, _, squared, top = sums_of(bent, 0.0, floor, ceiling, vocab_size, tile)
            floor = tl.maximum(floor, tl.minimum(top, tl.log(squared) - tl.log(whole)))
        if follows:
            _, whole, _, _, top = sums_of(bent, 0.0, floor, ceiling, vocab_size, tile)
            floor = tl.maximum(floor, tl.minimum(top, tl.log(whole) - limit * LOG_2))
        if excludes:
            _, whole, _, _, _ = sums_of(bent, 0.0, floor, ceiling, vocab_size, tile)
            enough = tl.log(tl.load(xtc_thresholds + row)) + tl.log(whole)
            least, _ = _ends(bent, tl.maximum(floor, enough), ceiling, vocab_size, tile)
            ceiling = tl.minimum(ceiling, least)  # infinite if none reaches it
        if ceiling < float("inf"):
            lanes = tl.arange(0, tile)
            for start in range(0, vocab_size, tile):
                ids = start + lanes
                x = tl.load(bent + ids, mask=ids < vocab_size, other=float("-inf"))
                tl.store(bent + ids, float("-inf"), mask=(ids < vocab_size) & (x > ceiling))
        tl.store(floors + row, floor)


@triton.jit
def _coin(
    row: tl.tensor, seeds_low: tl.tensor, seeds_high: tl.tensor, children: tl.tensor, positions: tl.tensor
) -> tl.tensor:
    """One number between 0 and 1, the same as `draw.coin` has."""
    nothing = tl.zeros((1,), tl.uint32)
    word, _, _, _ = philox(
        nothing,
        nothing + tl.load(positions + row).to(tl.uint32),
        nothing + tl.load(children + row).to(tl.uint32),
        nothing + COIN_LEVEL,
        nothing + tl.load(seeds_low + row).to(tl.uint32),
        nothing + tl.load(seeds_high + row).to(tl.uint32),
    )
    return tl.sum((word.to(tl.float64) + 0.5) * WORD_STEP, axis=0)


@triton.jit
def _ends(bent: tl.tensor, low: tl.tensor, high: tl.tensor, vocab_size: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """The least and the largest x between these; infinite and minus infinite if there is none."""
    lanes = tl.arange(0, tile)
    least = tl.full((tile,), float("inf"), tl.float32)
    largest = tl.full((tile,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(bent + ids, mask=ids < vocab_size, other=float("-inf"))
        is_between = (x > float("-inf")) & (x >= low) & (x <= high)
        least = tl.minimum(least, tl.where(is_between, x, float("inf")))
        largest = tl.maximum(largest, tl.where(is_between, x, float("-inf")))
    return tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _most_typical(
    bent: tl.tensor,
    floor: tl.tensor,
    p: tl.tensor,
    vocab_size: tl.constexpr,
    tile: tl.constexpr,
    weighed_at_once: tl.constexpr,
) -> tl.tensor:
    """The floor and the ceiling of what lies nearest to the entropy.

    The distance is found exactly, as a float32 among all of them in order: every read weighs 16 of those still open.
    """
    _, whole, weighted, _, _ = sums_of(bent, 0.0, floor, float("inf"), vocab_size, tile)
    typical = weighted / whole  # where the surprise is the entropy
    nearest, furthest = tl.full((), -1, tl.int64), tl.full((), 0x7F800000, tl.int64)  # bits: too few, enough
    wanted = p * whole
    steps = 1 + tl.arange(0, THRESHOLDS).to(tl.int64)
    lanes = tl.arange(0, weighed_at_once)
    while furthest - nearest > 1:
        limits = nearest + (furthest - nearest) * steps // THRESHOLDS
        masses = tl.zeros((THRESHOLDS,), tl.float32)
        for start in range(0, vocab_size, weighed_at_once):
            ids = start + lanes
            x = tl.load(bent + ids, mask=ids < vocab_size, other=float("-inf"))
            is_left = (x > float("-inf")) & (x >= floor)
            weight = tl.where(is_left, tl.exp(x), 0.0)
            distance = tl.where(is_left, tl.abs(x - typical), 0.0).to(tl.int32, bitcast=True).to(tl.int64)
            masses += tl.sum(tl.where(distance[None, :] <= limits[:, None], weight[None, :], 0.0), axis=1)
        is_enough = masses >= wanted
        # Where rounding says that nothing is enough, all stay.
        enough = tl.min(tl.where(is_enough, limits, furthest), axis=0)
        nearest = tl.max(tl.where(is_enough | (limits >= enough), nearest, limits), axis=0)
        furthest = enough
    reach = furthest.to(tl.int32).to(tl.float32, bitcast=True)
    least = tl.full((weighed_at_once,), float("inf"), tl.float32)
    largest = tl.full((weighed_at_once,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, weighed_at_once):
        ids = start + lanes
        x = tl.load(bent + ids, mask=ids < vocab_size, other=float("-inf"))
        is_near = (x > float("-inf")) & (x >= floor) & (tl.abs(x - typical) <= reach)
        least = tl.minimum(least, tl.where(is_near, x, float("inf")))
        largest = tl.maximum(largest, tl.where(is_near, x, float("-inf")))
    return tl.min(least, axis=0), tl.max(largest, axis=0)
