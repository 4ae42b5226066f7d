"""top-k, top-p and min-p as floors, found without sorting the vocabulary; the truth is `sampling/filters.py`.

A floor is the largest value of the row such that it and all that is larger weigh enough: each weighs 1 for top-k, its
probability for top-p. The search keeps a bracket, and whatever the row, a few reads narrow it to a handful of values:

    low ............ ceiling          low and all above it: enough; from the ceiling on: weighed, not enough

    begin     what reaches the k-th (or 64th) largest of the blocks' largest: enough for nearly every row that is drawn
              from in practice, and only these blocks are read. The others, flat rows, stay open:
    propose   among 512 logits, evenly spread over the vocabulary, where would the floor be? The sample's values around
              there are 16 thresholds
    weigh     one read of the row, by several programs: how much reaches each threshold
    narrow    two of the thresholds are the next bracket; what lies inside is collected and, if it fits into the buffer,
              settled in registers
    finish    whoever is open still: thresholds that cut the bracket evenly, until what is left fits

A sample tells of ranks, not of values, so these few reads are enough for every kind of row; a value that many ties have
is one of the sample, and the bracket is open on both sides. Where a sample misleads all the same, `finish` cuts what is
left of the list of all float32 numbers into 17 equal parts, eight times at most. Sums have one fixed order: a row's
floor is the same in every batch. Top-k comes first, then top-p among what it left, each by these five launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.brackets import (
    THRESHOLDS,
    collect,
    even_thresholds,
    index_of,
    narrowed,
    rate_of,
    sampled_thresholds,
    select,
    settle_collected,
    weigh,
)
from ramify.gpu.kernels.race import BLOCK, BlockScores, scaled, width_of

CAPACITY, FEW = 4096, 512  # candidates that are settled in registers, and those of nearly every row
FIRST_GUESS = 64  # top-p first looks at what reaches the 64th largest block
SPLIT = tl.constexpr(32 * 1024)  # logits that one program weighs
LOW, CEILING, ABOVE, WANTED, TOTAL = map(tl.constexpr, range(5))  # of a bracket
BRACKET = tl.constexpr(5)


class FloorScratch(NamedTuple):
    """Memory the search works in; its content means nothing afterwards."""

    blocks: Tensor  # (R, blocks) int32: those that reach into the bracket
    candidates: Tensor  # (R, a power of two) float32
    brackets: Tensor  # (R, 5) float32: low, ceiling, above, wanted, total
    is_open: Tensor  # (R,) int32
    thresholds: Tensor  # (R, 16) float32
    reached: Tensor  # (R, splits, 16) float32

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> FloorScratch:
        blocks = torch.empty(rows, triton.cdiv(vocab_size, BLOCK.value), dtype=torch.int32, device=device)
        return cls(
            blocks,
            torch.empty(rows, CAPACITY, device=device),
            torch.empty(rows, BRACKET.value, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, THRESHOLDS.value, device=device),
            torch.empty(rows, triton.cdiv(vocab_size, SPLIT.value), THRESHOLDS.value, device=device),
        )


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
    splits = scratch.reached.shape[1]
    row_of = (logits, logits.stride(0), temperatures, scores.largest)
    sizes = {"vocab_size": vocab_size, "num_blocks": num_blocks, "width": width_of(num_blocks)}
    room = {**sizes, "capacity": capacity, "few": min(FEW, capacity)}
    for by_mass in (False, True):
        bracket = (scratch.brackets, scratch.is_open)
        memory = (scratch.blocks, scratch.candidates)
        _begin[(rows,)](
            *row_of,
            scores.sums,
            top_k,
            top_p,
            *memory,
            *bracket,
            by_mass=by_mass,
            first_guess=min(FIRST_GUESS, num_blocks),
            **room,
            num_warps=8,
        )
        _propose[(rows,)](*row_of, *bracket, scratch.thresholds, by_mass=by_mass, **sizes, num_warps=4)
        _weigh_rows[(rows, splits)](
            *row_of, *bracket, scratch.thresholds, scratch.reached, by_mass=by_mass, **sizes, num_warps=8
        )
        _narrow[(rows,)](
            *row_of, *memory, *bracket, scratch.thresholds, scratch.reached, by_mass=by_mass, splits=splits, **room,
            num_warps=8,
        )  # fmt: skip
        _finish[(rows,)](*row_of, min_p, *memory, *bracket, floors, by_mass=by_mass, **room, num_warps=8)


@triton.jit
def _begin(  # noqa: PLR0915
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    block_sums: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    brackets: tl.tensor,
    is_open: tl.tensor,
    by_mass: tl.constexpr,
    first_guess: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
) -> None:
    """What the blocks' largest tell; by mass, what top-k left is in `brackets` already."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    listed += row * num_blocks
    candidates += row * capacity
    brackets += row * BRACKET
    blocks = tl.arange(0, width)
    exists = blocks < num_blocks
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=exists, other=float("-inf"))
    largest, temperature = tl.max(tops, axis=0), tl.load(temperatures + row)
    rate, k = rate_of(temperature), tl.load(top_k + row)
    narrows = (k > 0) & (k < vocab_size)
    # NaN fails every comparison: such rows have no floor.
    asks = (temperature > 0) & (largest > float("-inf")) & (largest < float("inf"))
    low = tl.full((), float("-inf"), tl.float32)
    tl.store(is_open + row, 0)
    if by_mass:
        low = tl.load(brackets + LOW)
        p = tl.load(top_p + row)
        asks = asks & (p < 1.0)
    else:
        asks = asks & narrows
    if asks:
        ones = tl.where(exists, 1.0, 0.0)
        lowest_top = tl.min(tl.where(exists, tops, float("inf")), axis=0)
        if by_mass:
            if narrows:  # noqa: SIM108, not a value but a tensor decides
                guess = low  # what top-k left begins there
            else:
                guess = select(tops, ones, lowest_top, largest, 0.0, first_guess)
        else:
            guess = select(tops, ones, lowest_top, largest, 0.0, tl.minimum(k, num_blocks).to(tl.float32))
        weight, count, smallest = collect(
            logits, listed, candidates, tops, largest, rate, guess, float("inf"), True,
            by_mass, vocab_size, num_blocks, width, capacity,
        )  # fmt: skip
        if by_mass:
            sums = tl.load(block_sums + row * num_blocks + blocks, mask=exists, other=0.0)
            whole = tl.sum(tl.where(exists, tl.exp(scaled(tops, largest, temperature)) * sums, 0.0), axis=0)
            total = tl.where(narrows, weight, whole)
            wanted = p * total
        else:
            total = vocab_size * 1.0
            wanted = k.to(tl.float32)
        is_enough = weight >= wanted
        ceiling = tl.where(is_enough, float("inf"), guess)
        above = tl.where(is_enough, 0.0, weight)
        tl.store(is_open + row, ((count > capacity) | (weight < wanted)).to(tl.int32))
        if is_enough:
            low = settle_collected(
                candidates, count, largest, rate, smallest, above, wanted, by_mass, capacity, few
            )  # fmt: skip
        tl.store(brackets + CEILING, ceiling)
        tl.store(brackets + ABOVE, above)
        tl.store(brackets + WANTED, wanted)
        tl.store(brackets + TOTAL, total)
    tl.store(brackets + LOW, low)


@triton.jit
def _propose(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    brackets: tl.tensor,
    is_open: tl.tensor,
    thresholds: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open + row) != 0:
        brackets += row * BRACKET
        blocks = tl.arange(0, width)
        tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
        chosen = sampled_thresholds(
            logits + row * logits_stride,
            tl.max(tops, axis=0),
            rate_of(tl.load(temperatures + row)),
            tl.load(brackets + LOW),
            tl.load(brackets + CEILING),
            tl.load(brackets + ABOVE),
            tl.load(brackets + WANTED),
            tl.load(brackets + TOTAL),
            by_mass,
            vocab_size,
        )
        tl.store(thresholds + row * THRESHOLDS + tl.arange(0, THRESHOLDS), chosen)


@triton.jit
def _weigh_rows(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    brackets: tl.tensor,
    is_open: tl.tensor,
    thresholds: tl.tensor,
    reached: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open + row) != 0:
        split = tl.program_id(1)
        lanes = tl.arange(0, THRESHOLDS)
        blocks = tl.arange(0, width)
        tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
        part = weigh(
            logits + row * logits_stride,
            tl.load(thresholds + row * THRESHOLDS + lanes),
            tl.max(tops, axis=0),
            rate_of(tl.load(temperatures + row)),
            tl.load(brackets + row * BRACKET + CEILING),
            split * SPLIT,
            tl.minimum((split + 1) * SPLIT, vocab_size),
            by_mass,
            vocab_size,
        )
        tl.store(reached + (row * tl.num_programs(1) + split) * THRESHOLDS + lanes, part)


@triton.jit
def _narrow(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    brackets: tl.tensor,
    is_open: tl.tensor,
    thresholds: tl.tensor,
    reached: tl.tensor,
    by_mass: tl.constexpr,
    splits: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open + row) != 0:
        brackets += row * BRACKET
        lanes = tl.arange(0, THRESHOLDS)
        above, wanted = tl.load(brackets + ABOVE), tl.load(brackets + WANTED)
        whole = above + tl.zeros((THRESHOLDS,), tl.float32)
        for split in range(splits):
            whole += tl.load(reached + (row * splits + split) * THRESHOLDS + lanes)
        low, ceiling, above = narrowed(
            tl.load(thresholds + row * THRESHOLDS + lanes),
            whole,
            tl.load(brackets + LOW),
            tl.load(brackets + CEILING),
            above,
            wanted,
        )
        blocks = tl.arange(0, width)
        tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
        largest, rate = tl.max(tops, axis=0), rate_of(tl.load(temperatures + row))
        _, count, _ = collect(
            logits + row * logits_stride, listed + row * num_blocks, candidates + row * capacity, tops, largest, rate,
            low, ceiling, False, by_mass, vocab_size, num_blocks, width, capacity,
        )  # fmt: skip
        low = settle_collected(
            candidates + row * capacity, count, largest, rate, low, above, wanted, by_mass, capacity, few
        )
        tl.store(brackets + LOW, low)
        tl.store(brackets + CEILING, ceiling)
        tl.store(brackets + ABOVE, above)
        tl.store(is_open + row, (count > capacity).to(tl.int32))


@triton.jit
def _finish(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    block_largest: tl.tensor,
    min_p: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    brackets: tl.tensor,
    is_open: tl.tensor,
    floors: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
) -> None:
    """Closes what is open; by mass, the last round, min-p joins in and the floor is written."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    listed += row * num_blocks
    candidates += row * capacity
    brackets += row * BRACKET
    blocks = tl.arange(0, width)
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    largest, temperature = tl.max(tops, axis=0), tl.load(temperatures + row)
    rate = rate_of(temperature)
    low = tl.load(brackets + LOW)
    if tl.load(is_open + row) != 0:
        ceiling, above, wanted = tl.load(brackets + CEILING), tl.load(brackets + ABOVE), tl.load(brackets + WANTED)
        searching = True
        while searching:
            thresholds = even_thresholds(low, ceiling)
            reached = above + weigh(logits, thresholds, largest, rate, ceiling, 0, vocab_size, by_mass, vocab_size)
            low, ceiling, above = narrowed(thresholds, reached, low, ceiling, above, wanted)
            _, count, _ = collect(
                logits, listed, candidates, tops, largest, rate, low, ceiling, False,
                by_mass, vocab_size, num_blocks, width, capacity,
            )  # fmt: skip
            low = settle_collected(candidates, count, largest, rate, low, above, wanted, by_mass, capacity, few)
            searching = (count > capacity) & (index_of(ceiling) - index_of(low) > 1)
        tl.store(brackets + LOW, low)
    if by_mass:
        smallest_share = tl.load(min_p + row)
        asks = (temperature > 0) & (largest > float("-inf")) & (largest < float("inf"))
        if asks & (smallest_share > 0.0):
            # Rounding must not throw out the likeliest itself.
            low = tl.maximum(low, tl.minimum(largest, largest + temperature * tl.log(smallest_share)))
        tl.store(floors + row, low)
