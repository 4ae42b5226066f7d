"""top-k, top-p and min-p as floors, found without sorting the vocabulary; the truth is `sampling/filters.py`.

A floor is the largest value of the row such that it and all that is larger weigh enough: each weighs 1 for top-k, its
probability for top-p.

    begin     where the blocks' largest alone weigh enough, the floor is among what reaches the least of these: so it is
              with nearly every row that is drawn from in practice, and only these blocks are read. The others, flat
              rows, stay open:
    sieve     a sample brackets the floor, one read by many programs weighs what is above and copies what is inside,
              and the floor is settled among the copies (sieve.py). Once for all open rows, once more for those that
              were searched by top-k and want top-p as well
    finish    rows that a sample misled are searched by eight reads; min-p joins in

So a row is read once whatever it is like. Sums have one fixed order: a row's floor is the same in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.brackets import (
    THRESHOLDS,
    exact_floor,
    masses_of,
    rate_of,
    select,
    weigh,
)
from ramify.gpu.kernels.race import BLOCK, BlockScores, scaled, width_of
from ramify.gpu.kernels.sieve import (
    BRACKET,
    BY_COUNT,
    BY_MASS,
    CLOSED,
    LARGEST,
    LEAST,
    LOST_COUNT,
    LOW,
    MASS,
    PARTS,
    WANTED,
    propose,
    settle,
    sift,
)

CAPACITY, FEW = 4096, 512  # of what begin collects: what is settled in registers, and what nearly every row has
MOST_READ = 128  # blocks: a row whose floor more of them reach counts as flat
BLOCKS_AT_ONCE = tl.constexpr(8)
SAMPLE, SAMPLED_NEIGHBOURS = 8192, 2
SIFTED = 5120  # logits that one program sifts, or fewer
SEGMENT = 256  # copies of one program that sifts: a twentieth, and half as many again
# Where a thread has one place in every block, and what it finds there goes behind what the threads before it find.
BEGIN_WARPS = SIFT_WARPS = BLOCK.value // 32
PROPOSE_WARPS, SETTLE_WARPS = 8, 16


class FloorScratch(NamedTuple):
    """Memory the search works in; its content means nothing afterwards."""

    blocks: Tensor  # (R, blocks) int32: those that begin reads
    brackets: Tensor  # (R, 7) float32: low, tie, ceiling, wanted, largest, the row's mass, the least floor
    kinds: Tensor  # (R,) int32
    parts: Tensor  # (R, 5, splits) float32: of each program what is above, its mass, ties, lows, how many are inside
    copies: Tensor  # (R, splits, segment) float32: those that are inside, or what begin collects

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device, segment: int = SEGMENT) -> FloorScratch:
        splits = triton.next_power_of_2(triton.cdiv(vocab_size, SIFTED))
        return cls(
            torch.empty(rows, triton.cdiv(vocab_size, BLOCK.value), dtype=torch.int32, device=device),
            torch.empty(rows, BRACKET.value, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, PARTS.value, splits, device=device),
            torch.empty(rows, splits, segment, device=device),
        )


class Floors:
    """Memory for the floors of up to so many rows, found again and again in the same places: a graph may know them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._scratch = FloorScratch.empty(max_rows, vocab_size, device)
        self._values = torch.empty(max_rows, device=device)

    def find(
        self, logits: Tensor, temperatures: Tensor, scores: BlockScores, *, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        """As `find_floors`; (R,), there until floors are next found."""
        size = logits.shape[0]
        scratch, floors = FloorScratch(*(part[:size] for part in self._scratch)), self._values[:size]
        find_floors(logits, temperatures, scores, top_k=top_k, top_p=top_p, min_p=min_p, scratch=scratch, floors=floors)
        return floors


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
    sample: int = SAMPLE,
) -> None:
    """Floors (R,) float32 of logits (R, V), on the scale of the logits: x stays where x >= floor.

    scores are what score_blocks made of these logits and temperatures, before any keep_above. top_k (R,) integers,
    below 1 or from V on: none; top_p (R,) float32, from 1 on: none; min_p (R,) float32, 0: none. Greedy rows and rows
    that are not finite get minus infinity.
    """
    rows, vocab_size = logits.shape
    num_blocks = scores.largest.shape[1]
    _, splits, segment = scratch.copies.shape
    capacity = min(CAPACITY, splits * segment)
    row_of = (logits, logits.stride(0), temperatures)
    state = (scratch.brackets, scratch.kinds)
    sizes = {"vocab_size": vocab_size, "num_blocks": num_blocks}
    _begin[(rows,)](
        *row_of,
        scores.largest,
        scores.sums,
        top_k,
        top_p,
        scratch.blocks,
        scratch.copies,
        *state,
        most_read=MOST_READ,
        **sizes,
        width=width_of(num_blocks),
        row_copies=splits * segment,
        capacity=capacity,
        few=min(FEW, capacity),
        num_warps=BEGIN_WARPS,
    )
    for splits_each in (1, min(splits, 8)):  # few rows come again, so few programs look for them
        propose[(rows,)](
            *row_of, *state, sample=sample, neighbours=SAMPLED_NEIGHBOURS, vocab_size=vocab_size,
            num_warps=PROPOSE_WARPS,
        )  # fmt: skip
        sift[(rows, splits // splits_each)](
            *row_of, *state, scratch.parts, scratch.copies, **sizes, splits=splits, segment=segment,
            splits_each=splits_each, num_warps=SIFT_WARPS,
        )  # fmt: skip
        settle[(rows,)](
            temperatures, top_p, *state, scratch.parts, scratch.copies, splits=splits, segment=segment,
            num_warps=SETTLE_WARPS,
        )  # fmt: skip
    _finish[(rows,)](*row_of, top_p, min_p, *state, floors, vocab_size=vocab_size, num_warps=8)


@triton.jit
def _begin(
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
    kinds: tl.tensor,
    most_read: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    row_copies: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
) -> None:
    """What a row is searched by, and what the blocks' largest tell of its floor."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    listed += row * num_blocks
    candidates += row * row_copies
    brackets += row * BRACKET
    blocks = tl.arange(0, width)
    exists = blocks < num_blocks
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=exists, other=float("-inf"))
    sums = tl.load(block_sums + row * num_blocks + blocks, mask=exists, other=0.0)
    largest, temperature = tl.max(tops, axis=0), tl.load(temperatures + row)
    rate, k, p = rate_of(temperature), tl.load(top_k + row), tl.load(top_p + row)
    # NaN fails every comparison: such rows have no floor.
    is_sound = (temperature > 0) & (largest > float("-inf")) & (largest < float("inf"))
    counts = is_sound & (k > 0) & (k < vocab_size)
    kind = tl.where(counts, BY_COUNT, tl.where(is_sound & (p < 1.0), BY_MASS, CLOSED))
    low = tl.full((), float("-inf"), tl.float32)
    if kind != CLOSED:
        heights = tl.where(exists, tl.exp(scaled(tops, largest, temperature)), 0.0)
        mass = tl.sum(heights * sums, axis=0)
        wanted = tl.where(counts, k.to(tl.float32), p * mass)
        # What the blocks' largest alone weigh is there for sure.
        weights = tl.where(counts, tl.where(exists, 1.0, 0.0), heights)
        guess = tl.full((), float("-inf"), tl.float32)
        if tl.sum(weights, axis=0) >= wanted:
            guess = select(tops, weights, tl.min(tl.where(exists, tops, float("inf")), axis=0), largest, 0.0, wanted)
        if (guess > float("-inf")) & (tl.sum((tops >= guess).to(tl.int32), axis=0) <= most_read):
            count = _collect(logits, listed, candidates, tops, guess, vocab_size, num_blocks, width, capacity)
            if count <= few:
                low = _settle(candidates, count, largest, rate, counts, wanted, p, few)
            elif count <= capacity:
                low = _settle(candidates, count, largest, rate, counts, wanted, p, capacity)
        kind = tl.where(low > float("-inf"), CLOSED, kind)
        tl.store(brackets + WANTED, wanted)
        tl.store(brackets + MASS, mass)
        tl.store(brackets + LEAST, float("-inf"))
    tl.store(kinds + row, kind)
    tl.store(brackets + LARGEST, largest)
    tl.store(brackets + LOW, low)


@triton.jit
def _collect(
    logits: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    tops: tl.tensor,
    low: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
) -> tl.tensor:
    """How many x >= low there are, and up to `capacity` of them; reads only the blocks that reach low."""
    blocks = tl.arange(0, width)
    is_read = (blocks < num_blocks) & (tops >= low)
    num_read = tl.sum(is_read.to(tl.int32), axis=0)
    tl.store(listed + tl.cumsum(is_read.to(tl.int32), axis=0) - 1, blocks, mask=is_read)
    # Memory that other threads of this program wrote is read only after a barrier.
    tl.debug_barrier()
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_read, BLOCKS_AT_ONCE):
        for step in tl.static_range(BLOCKS_AT_ONCE):
            is_block = start + step < num_read
            ids = tl.load(listed + start + step, mask=is_block, other=num_blocks) * BLOCK + lanes
            x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
            counts += ((x >= low) & (ids < vocab_size)).to(tl.int32)
    count = tl.sum(counts, axis=0)
    if count <= capacity:
        # Each lane's go behind those of the lanes before it. They are read again, out of a cache.
        target = candidates + tl.cumsum(counts, axis=0) - counts
        for start in range(0, num_read, BLOCKS_AT_ONCE):
            for step in tl.static_range(BLOCKS_AT_ONCE):
                is_block = start + step < num_read
                ids = tl.load(listed + start + step, mask=is_block, other=num_blocks) * BLOCK + lanes
                x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
                is_in = (x >= low) & (ids < vocab_size)
                tl.store(target, x, mask=is_in)
                target += is_in.to(tl.int32)
    tl.debug_barrier()
    return count


@triton.jit
def _settle(
    candidates: tl.tensor,
    count: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    counts: tl.tensor,
    wanted: tl.tensor,
    p: tl.tensor,
    size: tl.constexpr,
) -> tl.tensor:
    """The floor among what was collected, by top-k if it counts and then by top-p; minus infinity if it is lower."""
    lanes = tl.arange(0, size)
    x = tl.load(candidates + lanes, mask=lanes < count, other=float("-inf"))
    low = tl.min(tl.where(lanes < count, x, float("inf")), axis=0)
    if counts:
        if count >= wanted:
            low = select(x, tl.where(lanes < count, 1.0, 0.0), low, largest, 0.0, wanted)
        else:
            low = tl.full((), float("-inf"), tl.float32)
    if (p < 1.0) & (low > float("-inf")):
        masses = tl.where((lanes < count) & (x >= low), masses_of(x, largest, rate), 0.0)
        mass = tl.sum(masses, axis=0)
        wanted = tl.where(counts, p * mass, wanted)
        if mass >= wanted:  # noqa: SIM108, not a value but a tensor decides
            low = select(x, masses, low, largest, 0.0, wanted)
        else:
            low = tl.full((), float("-inf"), tl.float32)
    return low


@triton.jit
def _finish(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    brackets: tl.tensor,
    kinds: tl.tensor,
    floors: tl.tensor,
    vocab_size: tl.constexpr,
) -> None:
    """Searches what is lost, and writes all floors."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    brackets += row * BRACKET
    kind, temperature = tl.load(kinds + row), tl.load(temperatures + row)
    floor, largest = tl.load(brackets + LOW), tl.load(brackets + LARGEST)
    if kind != CLOSED:
        rate, p, wanted = rate_of(temperature), tl.load(top_p + row), tl.load(brackets + WANTED)
        floor, lowest = tl.load(brackets + LEAST), tl.full((), float("-inf"), tl.float32)
        if kind == LOST_COUNT:
            floor = exact_floor(logits, largest, rate, False, lowest, wanted, vocab_size)
            reached = weigh(logits, floor + tl.zeros((THRESHOLDS,), tl.float32), largest, rate, True, vocab_size)
            wanted = p * tl.max(reached, axis=0)
        if p < 1.0:
            floor = tl.maximum(floor, exact_floor(logits, largest, rate, True, lowest, wanted, vocab_size))
    smallest_share = tl.load(min_p + row)
    is_sound = (temperature > 0) & (largest > float("-inf")) & (largest < float("inf"))
    if is_sound & (smallest_share > 0.0):
        # Rounding must not throw out the likeliest itself.
        floor = tl.maximum(floor, tl.minimum(largest, largest + temperature * tl.log(smallest_share)))
    tl.store(floors + row, floor)
