"""top-k, top-p and min-p as floors, found without sorting the vocabulary; the truth is `sampling/filters.py`.

A floor is the largest value of the row such that it and all that is larger weigh enough: each weighs 1 for top-k, its
probability for top-p. The search keeps a bracket and reads only blocks whose largest logit reaches into it:

    low ............ guess ............ top        everything above top: weighed already, not enough
     |                 |<-- weighed, -->|
     |                    collected
     enough: low becomes the smallest collected, and if they fit into the buffer the rest happens in registers
     not enough: top becomes the largest below the guess

The first guess comes from the blocks' largest logits: the k-th largest of them is never above the k-th largest logit,
so it is enough for top-k. Later guesses halve the bracket, in turns by value and by index in the sorted list of all
float32 numbers, which ends after 64 passes at worst and a few at best. Sums have one fixed order: a row's floor is the
same in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.race import BLOCK, BlockScores, scaled, width_of

BLOCKS_AT_ONCE = tl.constexpr(16)  # 4,096 logits
LANES = tl.constexpr(BLOCKS_AT_ONCE * BLOCK)
CAPACITY, FEW = 4096, 512  # candidates that are settled in registers, and those of nearly every row
FIRST_GUESS = 64  # top-p first looks at what reaches the 64th largest block


class FloorScratch(NamedTuple):
    """Memory the search works in; its content means nothing afterwards."""

    blocks: Tensor  # (R, blocks) int32: those that reach into the bracket
    candidates: Tensor  # (R, a power of two) float32

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> FloorScratch:
        blocks = torch.empty(rows, triton.cdiv(vocab_size, BLOCK.value), dtype=torch.int32, device=device)
        return cls(blocks, torch.empty(rows, CAPACITY, device=device))


def find_floors(
    logits: Tensor,
    temperatures: Tensor,
    scores: BlockScores,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    scratch: FloorScratch,
    floors: Tensor,
) -> None:
    """Floors (R,) float32 of logits (R, V), on the scale of the logits: x stays where x >= floor.

    scores are what score_blocks made of these logits and temperatures, before any keep_above. top_k (R,) integers,
    below 1 or from V on: none; top_p (R,) float32, from 1 on: none; min_p (R,) float32, 0: none. Greedy rows and rows
    that are not finite get minus infinity.
    """
    rows, vocab_size = logits.shape
    num_blocks, capacity = scores.largest.shape[1], scratch.candidates.shape[1]
    _find_floors[(rows,)](
        logits,
        temperatures,
        scores.largest,
        scores.sums,
        top_k,
        top_p,
        min_p,
        scratch.blocks,
        scratch.candidates,
        floors,
        logits.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        width=width_of(num_blocks),
        capacity=capacity,
        few=min(FEW, capacity),
        first_guess=min(FIRST_GUESS, num_blocks),
        second_guess=num_blocks - num_blocks // 8,
        num_warps=8,
    )


@triton.jit
def _index_of(value: tl.tensor) -> tl.tensor:
    """The index of a float32 in the sorted list of all of them, counted from zero's: int64."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_at(index: tl.tensor) -> tl.tensor:
    bits = index.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low: tl.tensor, top: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """A value above low and up to top, where low < top."""
    by_value = 0.5 * low + 0.5 * top
    by_index = _float_at((_index_of(low) + _index_of(top)) >> 1)
    middle = tl.where((turn % 2 == 0) & (by_value > low), by_value, by_index)
    return tl.where((middle > low) & (middle <= top), middle, top)


@triton.jit
def _select(
    x: tl.tensor, weights: tl.tensor, low: tl.tensor, top: tl.tensor, above: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """The largest value v of x, low <= v <= top, for which `above` and the weights of all x >= v reach `wanted`.

    low itself is taken to reach it. Values of x are from low to top, or weigh nothing.
    """
    turn = 0
    while low < top:
        middle = _middle(low, top, turn)
        is_high = x >= middle
        if above + tl.sum(tl.where(is_high, weights, 0.0), axis=0) >= wanted:
            low = tl.min(tl.where(is_high, x, float("inf")), axis=0)
        else:
            top = tl.max(tl.where(is_high, float("-inf"), x), axis=0)
        turn += 1
    return low


@triton.jit
def _weights(x: tl.tensor, largest: tl.tensor, temperature: tl.tensor, by_mass: tl.constexpr) -> tl.tensor:
    if by_mass:
        return tl.exp(scaled(x, largest, temperature))
    return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _weigh(
    logits: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    tops: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    low: tl.tensor,
    guess: tl.tensor,
    top: tl.tensor,
    looks_below: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
) -> tl.tensor:
    """One pass over what reaches the guess, or, looking below, over what reaches low.

    Returns of guess <= x <= top: weight, count (the first `capacity` are collected), smallest. Of low <= x < guess:
    largest; and, where the pass looked below, count and smallest of the finite ones.
    """
    blocks = tl.arange(0, width)
    exists = blocks < num_blocks
    is_read = exists & (tops >= tl.where(looks_below, low, guess))
    num_read = tl.sum(is_read.to(tl.int32), axis=0)
    # What other threads of this program write or still read: memory is shared only across a barrier.
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(is_read.to(tl.int32), axis=0) - 1, blocks, mask=is_read)
    tl.debug_barrier()

    lanes = tl.arange(0, LANES)
    weight = tl.zeros((LANES,), tl.float32)
    smallest = tl.full((LANES,), float("inf"), tl.float32)
    largest_below = tl.full((LANES,), float("-inf"), tl.float32)
    smallest_below = tl.full((LANES,), float("inf"), tl.float32)
    below = tl.zeros((LANES,), tl.int32)
    count = 0
    for start in range(0, num_read, BLOCKS_AT_ONCE):
        entry = start + lanes // BLOCK
        ids = tl.load(listed + entry, mask=entry < num_read, other=num_blocks) * BLOCK + lanes % BLOCK
        is_id = ids < vocab_size
        x = tl.load(logits + ids, mask=is_id, other=float("-inf"))
        is_high = is_id & (x >= guess) & (x <= top)
        weight += tl.where(is_high, _weights(x, largest, temperature, by_mass), 0.0)
        smallest = tl.minimum(smallest, tl.where(is_high, x, float("inf")))
        target = count + tl.cumsum(is_high.to(tl.int32), axis=0) - 1
        tl.store(candidates + target, x, mask=is_high & (target < capacity))
        count += tl.sum(is_high.to(tl.int32), axis=0)
        is_below = (x < guess) & (x >= low) & (x > float("-inf"))
        below += is_below.to(tl.int32)
        largest_below = tl.maximum(largest_below, tl.where(is_below, x, float("-inf")))
        smallest_below = tl.minimum(smallest_below, tl.where(is_below, x, float("inf")))
    tl.debug_barrier()
    unread = tl.max(tl.where(exists & ~is_read & (tops >= low), tops, float("-inf")), axis=0)
    return (
        tl.sum(weight, axis=0),
        count,
        tl.min(smallest, axis=0),
        tl.maximum(unread, tl.max(largest_below, axis=0)),
        tl.sum(below, axis=0),
        tl.min(smallest_below, axis=0),
    )


@triton.jit
def _search(
    logits: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    tops: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    low: tl.tensor,
    guess: tl.tensor,
    next_guess: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
) -> tl.tensor:
    """The largest value of the row from low on that, with all larger ones, weighs `wanted`; else low."""
    top = largest
    above = 0.0
    turn = 0
    looks_below = False
    searching = True
    while searching:
        weight, count, smallest, largest_below, below, smallest_below = _weigh(
            logits, listed, candidates, tops, largest, temperature, low, guess, top, looks_below,
            by_mass, vocab_size, num_blocks, width, capacity,
        )  # fmt: skip
        fits = False
        if above + weight >= wanted:
            low = smallest
            if count <= few:
                lanes = tl.arange(0, few)
                x = tl.load(candidates + lanes, mask=lanes < count, other=float("-inf"))
                weights = tl.where(lanes < count, _weights(x, largest, temperature, by_mass), 0.0)
                low = _select(x, weights, low, top, above, wanted)
                top = low
            elif count <= capacity:
                lanes = tl.arange(0, capacity)
                x = tl.load(candidates + lanes, mask=lanes < count, other=float("-inf"))
                weights = tl.where(lanes < count, _weights(x, largest, temperature, by_mass), 0.0)
                low = _select(x, weights, low, top, above, wanted)
                top = low
        else:
            above += weight
            top = largest_below
            if looks_below:
                low = tl.where(below > 0, smallest_below, low)
                fits = below <= capacity
        searching = low < top
        if searching:
            if fits:
                guess = low  # all that is left can be collected
            elif (turn == 0) & (next_guess > low) & (next_guess <= top):
                guess = next_guess
            else:
                guess = _middle(low, top, turn)
                looks_below = True
        turn += 1
    return low


@triton.jit
def _find_floors(
    logits: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    block_sums: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    floors: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
    first_guess: tl.constexpr,
    second_guess: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    listed += row * num_blocks
    candidates += row * capacity
    blocks = tl.arange(0, width)
    exists = blocks < num_blocks
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=exists, other=float("-inf"))
    largest = tl.max(tops, axis=0)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    smallest_share = tl.load(min_p + row)
    floor = float("-inf")
    # NaN fails every comparison: such rows have no floor.
    if (temperature > 0) & (largest > float("-inf")) & (largest < float("inf")):
        ones = tl.where(exists, 1.0, 0.0)
        lowest_top = tl.min(tl.where(exists, tops, float("inf")), axis=0)
        narrows = (k > 0) & (k < vocab_size)
        if narrows:
            wanted = tl.minimum(k, num_blocks).to(tl.float32)
            guess = _select(tops, ones, lowest_top, largest, 0.0, wanted)
            floor = _search(
                logits, listed, candidates, tops, largest, temperature, floor, guess, floor, k.to(tl.float32),
                False, vocab_size, num_blocks, width, capacity, few,
            )  # fmt: skip
        if p < 1.0:
            if narrows:
                total, _, _, _, _, _ = _weigh(
                    logits, listed, candidates, tops, largest, temperature, floor, floor, largest, False,
                    True, vocab_size, num_blocks, width, capacity,
                )  # fmt: skip
                guess = floor
                next_guess = floor
            else:
                sums = tl.load(block_sums + row * num_blocks + blocks, mask=exists, other=0.0)
                total = tl.sum(tl.where(exists, tl.exp(scaled(tops, largest, temperature)) * sums, 0.0), axis=0)
                guess = _select(tops, ones, lowest_top, largest, 0.0, first_guess)
                next_guess = _select(tops, ones, lowest_top, largest, 0.0, second_guess)
            floor = _search(
                logits, listed, candidates, tops, largest, temperature, floor, guess, next_guess, p * total,
                True, vocab_size, num_blocks, width, capacity, few,
            )  # fmt: skip
        if smallest_share > 0.0:
            # Rounding must not throw out the likeliest itself.
            floor = tl.maximum(floor, tl.minimum(largest, largest + temperature * tl.log(smallest_share)))
    tl.store(floors + row, floor)
