"""What bends a distribution, and the one cut that comes before; the truth is `sampling/shaping.py`.

    top_n_sigma    x >= largest - n * (standard deviation of the row)
    temperature    or a dynamic one, between temperature - reach and temperature + reach by the row's entropy
    smoothing      -factor * (distance from the largest)^2

One program bends one row: a read for each sum that its rules need, and one that writes. Rows that ask for no rule of
`sampling/truncation.py` or of these are copied as they are, with their temperature, so that what is drawn from them has
the same bits as without their neighbours; all others come out with a largest of 0 and a temperature of 1.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.race import COLDEST, BlockScores, width_of

TILE = 4096  # logits that a program reads at once


class Bends(NamedTuple):
    """What rows ask for, (R,) float32 each."""

    is_shaped: Tensor  # 1: some rule acts on it, here or when it is narrowed; 0: it is left as it is
    top_n_sigma: Tensor  # 0: none
    reach: Tensor  # of a dynamic temperature; 0: it is fixed
    exponent: Tensor
    smoothing: Tensor  # 0: none


def bend(
    logits: Tensor, temperatures: Tensor, scores: BlockScores, bends: Bends, *, bent: Tensor, bent_temperatures: Tensor
) -> None:
    """Logits (R, V) float32, temperatures (R,), and their scores -> bent (R, V), which may be the same memory, and the
    temperatures (R,) at which these are drawn from."""
    rows, vocab_size = logits.shape
    num_blocks = scores.largest.shape[1]
    _bend[(rows,)](
        logits,
        temperatures,
        scores.largest,
        *bends,
        bent,
        bent_temperatures,
        logits.stride(0),
        bent.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        width=width_of(num_blocks),
        tile=min(TILE, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


@triton.jit
def _bend(
    logits: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    is_shaped: tl.tensor,
    top_n_sigma: tl.tensor,
    reaches: tl.tensor,
    exponents: tl.tensor,
    smoothing: tl.tensor,
    bent: tl.tensor,
    bent_temperatures: tl.tensor,
    logits_stride: tl.tensor,
    bent_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    bent += row * bent_stride
    blocks = tl.arange(0, width)
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    largest, temperature = tl.max(tops, axis=0), tl.load(temperatures + row)
    # NaN fails every comparison: such rows stay as they are, and so do greedy ones.
    is_sound = (temperature > 0) & (largest > float("-inf")) & (largest < float("inf"))
    lanes = tl.arange(0, tile)
    if is_sound & (tl.load(is_shaped + row) > 0):
        furthest = tl.full((), float("-inf"), tl.float32)  # what is this far from the largest stays
        n, reach, factor = tl.load(top_n_sigma + row), tl.load(reaches + row), tl.load(smoothing + row)
        if n > 0:
            furthest = -n * _deviation(logits, largest, vocab_size, tile)
        if reach > 0:
            share = _relative_entropy(logits, largest, furthest, vocab_size, tile)
            share = tl.exp(tl.load(exponents + row) * tl.log(share))
            temperature = temperature - reach + 2.0 * reach * share
        divisor = tl.maximum(temperature, COLDEST) + tl.zeros((tile,), tl.float32)
        for start in range(0, vocab_size, tile):
            ids = start + lanes
            below = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")) - largest
            scaled = tl.div_rn(below, divisor)
            if factor > 0:
                scaled = -factor * scaled * scaled
            tl.store(bent + ids, tl.where(below >= furthest, scaled, float("-inf")), mask=ids < vocab_size)
        tl.store(bent_temperatures + row, 1.0)
    else:
        for start in range(0, vocab_size, tile):
            ids = start + lanes
            tl.store(bent + ids, tl.load(logits + ids, mask=ids < vocab_size, other=0.0), mask=ids < vocab_size)
        tl.store(bent_temperatures + row, temperature)


@triton.jit
def _deviation(logits: tl.tensor, largest: tl.tensor, vocab_size: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """The standard deviation of a row's finite logits, by two reads."""
    lanes = tl.arange(0, tile)
    count, total = tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        below = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")) - largest
        is_possible = below > float("-inf")
        count += is_possible.to(tl.float32)
        total += tl.where(is_possible, below, 0.0)
    number = tl.sum(count, axis=0)
    mean = tl.sum(total, axis=0) / number
    squares = tl.zeros((tile,), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        below = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")) - largest
        squares += tl.where(below > float("-inf"), (below - mean) * (below - mean), 0.0)
    return tl.sqrt(tl.sum(squares, axis=0) / number)


@triton.jit
def sums_of(
    logits: tl.tensor,
    largest: tl.tensor,
    floor: tl.tensor,
    ceiling: tl.tensor,
    vocab_size: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Of a row's x = logit - largest between floor and ceiling: how many there are, the sums of exp(x), of exp(x) * x
    and of exp(x)^2, and the largest x."""
    lanes = tl.arange(0, tile)
    count, whole = tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.float32)
    weighted, squared = tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.float32)
    tops = tl.full((tile,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        ids = start + lanes
        x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")) - largest
        is_left = (x > float("-inf")) & (x >= floor) & (x <= ceiling)
        weight = tl.where(is_left, tl.exp(x), 0.0)
        count += is_left.to(tl.float32)
        whole += weight
        weighted += weight * tl.where(is_left, x, 0.0)
        squared += weight * weight
        tops = tl.maximum(tops, tl.where(is_left, x, float("-inf")))
    sums = tl.sum(count, axis=0), tl.sum(whole, axis=0), tl.sum(weighted, axis=0), tl.sum(squared, axis=0)
    return sums[0], sums[1], sums[2], sums[3], tl.max(tops, axis=0)


@triton.jit
def _relative_entropy(
    logits: tl.tensor, largest: tl.tensor, furthest: tl.tensor, vocab_size: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """The entropy of what is left of a row, as a share of the most it could be."""
    count, whole, weighted, _, _ = sums_of(logits, largest, furthest, float("inf"), vocab_size, tile)
    share = (tl.log(whole) - weighted / whole) / tl.log(tl.maximum(count, 2.0))
    return tl.minimum(tl.maximum(share, 0.0), 1.0)
