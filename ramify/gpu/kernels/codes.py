"""Tokens read off arithmetic codes; the truth is `sampling/arithmetic.py`.

A token owns the part of 0 .. 1 between the sums of the probabilities before it and up to it. One program reads one
code: a read of the row tells what all of it weighs, another where the code falls. Sums are in float64, in the order of
ids.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.sampling import arithmetic as truth

TILE = 1024  # tokens that a program adds up at once
LARGEST_CODE = tl.constexpr(truth.LARGEST_CODE)
LEAST_SHARE = tl.constexpr(truth.LEAST_SHARE)


def read_codes(
    logits: Tensor,
    temperatures: Tensor,
    floors: Tensor,
    reads: Tensor,
    codes: Tensor,
    *,
    token_ids: Tensor,
    following: Tensor,
) -> None:
    """Of rows that read codes (R,), those whose temperature is not 0: token_ids (R,) int64, and the codes for the next.

    logits (R, V) are drawn from at temperature 1 where they are at least floors (R,). codes and following (R, 2)
    float64 are values and what is not known of them. Other rows are left as they are.
    """
    rows, vocab_size = logits.shape
    _read_codes[(rows,)](
        logits,
        temperatures,
        floors,
        reads,
        codes,
        token_ids,
        following,
        logits.stride(0),
        vocab_size=vocab_size,
        tile=min(TILE, triton.next_power_of_2(vocab_size)),
        num_warps=4,
    )


@triton.jit
def _read_codes(
    logits: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    reads: tl.tensor,
    codes: tl.tensor,
    token_ids: tl.tensor,
    following: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(reads + row) > 0) & (tl.load(temperatures + row) > 0):
        logits += row * stride
        floor = tl.load(floors + row)
        lanes = tl.arange(0, tile)
        whole = tl.full((), 0.0, tl.float64)
        for start in range(0, vocab_size, tile):
            whole += tl.sum(_weights(logits, start + lanes, floor, vocab_size), axis=0)
        wanted = tl.load(codes + 2 * row) * whole
        reached = tl.full((), 0.0, tl.float64)
        token, own = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
        before = tl.full((), 0.0, tl.float64)
        is_found = False
        for start in range(0, vocab_size, tile):
            if not is_found:
                weights = _weights(logits, start + lanes, floor, vocab_size)
                ends = reached + tl.cumsum(weights, axis=0)
                # The first that ends behind the code; till then the last that can be drawn, should rounding miss it.
                is_behind = (ends > wanted) & (weights > 0.0)
                is_found = tl.max(is_behind.to(tl.int32), axis=0) > 0
                first = tl.min(tl.where(is_behind, lanes, tile), axis=0)
                last = tl.max(tl.where(weights > 0.0, lanes, -1), axis=0)
                place = tl.where(is_found, first, last)
                if place >= 0:
                    token = start + place
                    own = tl.sum(tl.where(lanes == place, weights, 0.0), axis=0)
                    before = tl.sum(tl.where(lanes == place, ends, 0.0), axis=0) - own
                reached += tl.sum(weights, axis=0)
        inside = (wanted - before) / own
        inside = tl.minimum(tl.maximum(inside, 0.0), LARGEST_CODE)
        tl.store(token_ids + row, token.to(tl.int64))
        tl.store(following + 2 * row, inside)
        tl.store(following + 2 * row + 1, tl.load(codes + 2 * row + 1) / tl.maximum(own / whole, LEAST_SHARE))


@triton.jit
def _weights(logits: tl.tensor, ids: tl.tensor, floor: tl.tensor, vocab_size: tl.constexpr) -> tl.tensor:
    """exp(x) in float64 of what is left; the largest x is 0."""
    x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    is_left = (x > float("-inf")) & (x >= floor)
    return tl.where(is_left, tl.exp(tl.where(is_left, x, 0.0).to(tl.float64)), 0.0)
