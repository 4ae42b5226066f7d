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

from ramify.gpu.kernels.race import BLOCK, COLDEST, BlockScores, scaled, width_of

BLOCKS_AT_ONCE = tl.constexpr(16)  # 4,096 logits
LANES = tl.constexpr(BLOCKS_AT_ONCE * BLOCK)
CAPACITY, FEW = 4096, 512  # candidates that are settled in registers, and those of nearly every row
FIRST_GUESS = 64  # top-p first looks at what reaches the 64th largest block
SAMPLE, COMPARED_AT_ONCE = tl.constexpr(512), tl.constexpr(32)
THRESHOLDS = tl.constexpr(16)  # weighed in one read
WEIGHED_AT_ONCE = tl.constexpr(1024)
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
def _weights(x: tl.tensor, largest: tl.tensor, rate: tl.tensor, by_mass: tl.constexpr) -> tl.tensor:
    """rate: one over the temperature. Rounded otherwise than a division, by less than a sum is."""
    if by_mass:
        return tl.exp((x - largest) * rate)
    return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _collect(
    logits: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    tops: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    low: tl.tensor,
    ceiling: tl.tensor,
    takes_low: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    capacity: tl.constexpr,
) -> tl.tensor:
    """Of low < x < ceiling (low <= x, if it takes low): weight, count, smallest; up to `capacity` are collected.

    Reads only blocks whose largest logit is inside, or above.
    """
    blocks = tl.arange(0, width)
    is_read = (blocks < num_blocks) & (tops >= low)
    num_read = tl.sum(is_read.to(tl.int32), axis=0)
    # What other threads of this program write or still read: memory is shared only across a barrier.
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(is_read.to(tl.int32), axis=0) - 1, blocks, mask=is_read)
    tl.debug_barrier()

    lanes = tl.arange(0, LANES)
    weight = tl.zeros((LANES,), tl.float32)
    smallest = tl.full((LANES,), float("inf"), tl.float32)
    counts = tl.zeros((LANES,), tl.int32)
    for start in range(0, num_read, BLOCKS_AT_ONCE):
        entry = start + lanes // BLOCK
        ids = tl.load(listed + entry, mask=entry < num_read, other=num_blocks) * BLOCK + lanes % BLOCK
        is_id = ids < vocab_size
        x = tl.load(logits + ids, mask=is_id, other=float("-inf"))
        is_in = is_id & (x < ceiling) & ((x > low) | (takes_low & (x == low)))
        weight += tl.where(is_in, _weights(x, largest, rate, by_mass), 0.0)
        smallest = tl.minimum(smallest, tl.where(is_in, x, float("inf")))
        counts += is_in.to(tl.int32)
    count = tl.sum(counts, axis=0)
    if count <= capacity:
        # Each lane's go behind those of the lanes before it. They are read again, which is quicker than finding
        # every part's places among all lanes on the way.
        target = tl.cumsum(counts, axis=0) - counts
        for start in range(0, num_read, BLOCKS_AT_ONCE):
            entry = start + lanes // BLOCK
            ids = tl.load(listed + entry, mask=entry < num_read, other=num_blocks) * BLOCK + lanes % BLOCK
            is_id = ids < vocab_size
            x = tl.load(logits + ids, mask=is_id, other=float("-inf"))
            is_in = is_id & (x < ceiling) & ((x > low) | (takes_low & (x == low)))
            tl.store(candidates + target, x, mask=is_in)
            target += is_in.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(weight, axis=0), count, tl.min(smallest, axis=0)


@triton.jit
def _settle(
    candidates: tl.tensor,
    count: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    low: tl.tensor,
    above: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.constexpr,
    size: tl.constexpr,
) -> tl.tensor:
    """The largest of the collected that, with all larger ones, weighs enough; low, if none of them does."""
    lanes = tl.arange(0, size)
    x = tl.load(candidates + lanes, mask=lanes < count, other=float("-inf"))
    weights = tl.where(lanes < count, _weights(x, largest, rate, by_mass), 0.0)
    top = tl.max(x, axis=0)
    if above + tl.sum(weights, axis=0) >= wanted:
        low = _select(x, weights, tl.min(tl.where(lanes < count, x, float("inf")), axis=0), top, above, wanted)
    return low


@triton.jit
def _sampled_thresholds(
    logits: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    low: tl.tensor,
    ceiling: tl.tensor,
    above: tl.tensor,
    wanted: tl.tensor,
    total: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """Values of a sample around where the floor would be in it, closest together there."""
    stride: tl.constexpr = (vocab_size + SAMPLE - 1) // SAMPLE
    places = tl.arange(0, SAMPLE)
    x = tl.load(logits + places * stride, mask=places * stride < vocab_size, other=float("-inf"))
    weights = tl.where((x < ceiling) & (x > float("-inf")), _weights(x, largest, rate, by_mass), 0.0)
    # Of each, how many of the sample are larger, or equal and earlier, and what these weigh: it is small enough to
    # compare each with each.
    rank = tl.zeros((SAMPLE,), tl.int32)
    reached = weights
    for start in range(0, SAMPLE, COMPARED_AT_ONCE):
        others = start + tl.arange(0, COMPARED_AT_ONCE)
        y = tl.load(logits + others * stride, mask=others * stride < vocab_size, other=float("-inf"))
        y_weights = tl.where((y < ceiling) & (y > float("-inf")), _weights(y, largest, rate, by_mass), 0.0)
        is_ahead = (y[:, None] > x[None, :]) | ((y[:, None] == x[None, :]) & (others[:, None] < places[None, :]))
        rank += tl.sum(is_ahead.to(tl.int32), axis=0)
        reached += tl.sum(tl.where(is_ahead, y_weights[:, None], 0.0), axis=0)
    # As shares of what is below the ceiling: a sample that has drawn too many of the heaviest errs in both alike.
    share = (wanted - above) / (total - above)
    crossing = tl.sum((reached < share * tl.sum(weights, axis=0)).to(tl.int32), axis=0)
    # Ranks -36, -28, …, -3, -1, 1, 3, …, 28, 36 from there: each gap is one wider than the one before it.
    number = tl.arange(0, THRESHOLDS)
    side = tl.where(number < THRESHOLDS // 2, THRESHOLDS // 2 - number, number - THRESHOLDS // 2 + 1)
    away = side * (side + 1) // 2
    index = crossing + tl.where(number < THRESHOLDS // 2, -away, away)
    values = tl.max(tl.where(index[:, None] == rank[None, :], x[None, :], float("-inf")), axis=1)
    return tl.where(index < 0, ceiling, tl.where(index >= SAMPLE, low, values))


@triton.jit
def _even_thresholds(low: tl.tensor, ceiling: tl.tensor) -> tl.tensor:
    """That cut the list of all float32 numbers between low and ceiling into equal parts."""
    first, last = _index_of(low), _index_of(ceiling)
    return _float_at(first + (last - first) * (tl.arange(0, THRESHOLDS) + 1) // (THRESHOLDS + 1))


@triton.jit
def _weigh(
    logits: tl.tensor,
    thresholds: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    ceiling: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    by_mass: tl.constexpr,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """How much of the logits first … last - 1 that are below the ceiling reaches each threshold: (THRESHOLDS,)."""
    lanes = tl.arange(0, WEIGHED_AT_ONCE)
    reached = tl.zeros((THRESHOLDS, WEIGHED_AT_ONCE), tl.float32)
    x = tl.load(logits + first + lanes, mask=first + lanes < vocab_size, other=float("-inf"))
    for start in range(first, last, WEIGHED_AT_ONCE):
        # Asked for before it is needed: memory answers while this part is weighed.
        ids = start + WEIGHED_AT_ONCE + lanes
        following = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = tl.where(x < ceiling, _weights(x, largest, rate, by_mass), 0.0)
        reached += tl.where(x[None, :] >= thresholds[:, None], weights[None, :], 0.0)
        x = following
    return tl.sum(reached, axis=1)


@triton.jit
def _narrowed(
    thresholds: tl.tensor, reached: tl.tensor, low: tl.tensor, ceiling: tl.tensor, above: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """The bracket after a weighing: low, ceiling, and what is above the ceiling."""
    low = tl.maximum(low, tl.max(tl.where(reached >= wanted, thresholds, float("-inf")), axis=0))
    is_short = (reached < wanted) & (thresholds > low) & (thresholds < ceiling)
    ceiling = tl.minimum(ceiling, tl.min(tl.where(is_short, thresholds, float("inf")), axis=0))
    above = tl.maximum(above, tl.max(tl.where(is_short & (thresholds == ceiling), reached, 0.0), axis=0))
    return low, ceiling, above


@triton.jit
def _settle_collected(
    candidates: tl.tensor,
    count: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    low: tl.tensor,
    above: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.constexpr,
    capacity: tl.constexpr,
    few: tl.constexpr,
) -> tl.tensor:
    """As `_settle`, if all were collected; else low."""
    if count <= few:
        low = _settle(candidates, count, largest, rate, low, above, wanted, by_mass, few)
    elif count <= capacity:
        low = _settle(candidates, count, largest, rate, low, above, wanted, by_mass, capacity)
    return low


@triton.jit
def _rate_of(temperature: tl.tensor) -> tl.tensor:
    return 1.0 / tl.maximum(temperature, COLDEST)


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
    rate, k = _rate_of(temperature), tl.load(top_k + row)
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
            if narrows:
                guess = low
                total, _, _ = _collect(
                    logits, listed, candidates, tops, largest, rate, low, float("inf"), True,
                    True, vocab_size, num_blocks, width, capacity,
                )  # fmt: skip
            else:
                guess = _select(tops, ones, lowest_top, largest, 0.0, first_guess)
                sums = tl.load(block_sums + row * num_blocks + blocks, mask=exists, other=0.0)
                total = tl.sum(tl.where(exists, tl.exp(scaled(tops, largest, temperature)) * sums, 0.0), axis=0)
            wanted = p * total
        else:
            wanted = k.to(tl.float32)
            total = vocab_size * 1.0
            guess = _select(tops, ones, lowest_top, largest, 0.0, tl.minimum(wanted, num_blocks))
        weight, count, smallest = _collect(
            logits, listed, candidates, tops, largest, rate, guess, float("inf"), True,
            by_mass, vocab_size, num_blocks, width, capacity,
        )  # fmt: skip
        is_enough = weight >= wanted
        ceiling = tl.where(is_enough, float("inf"), guess)
        above = tl.where(is_enough, 0.0, weight)
        tl.store(is_open + row, ((count > capacity) | (weight < wanted)).to(tl.int32))
        if is_enough:
            low = _settle_collected(
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
        chosen = _sampled_thresholds(
            logits + row * logits_stride,
            tl.max(tops, axis=0),
            _rate_of(tl.load(temperatures + row)),
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
        part = _weigh(
            logits + row * logits_stride,
            tl.load(thresholds + row * THRESHOLDS + lanes),
            tl.max(tops, axis=0),
            _rate_of(tl.load(temperatures + row)),
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
        low, ceiling, above = _narrowed(
            tl.load(thresholds + row * THRESHOLDS + lanes),
            whole,
            tl.load(brackets + LOW),
            tl.load(brackets + CEILING),
            above,
            wanted,
        )
        blocks = tl.arange(0, width)
        tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
        largest, rate = tl.max(tops, axis=0), _rate_of(tl.load(temperatures + row))
        _, count, _ = _collect(
            logits + row * logits_stride, listed + row * num_blocks, candidates + row * capacity, tops, largest, rate,
            low, ceiling, False, by_mass, vocab_size, num_blocks, width, capacity,
        )  # fmt: skip
        low = _settle_collected(
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
    rate = _rate_of(temperature)
    low = tl.load(brackets + LOW)
    if tl.load(is_open + row) != 0:
        ceiling, above, wanted = tl.load(brackets + CEILING), tl.load(brackets + ABOVE), tl.load(brackets + WANTED)
        searching = True
        while searching:
            thresholds = _even_thresholds(low, ceiling)
            reached = above + _weigh(logits, thresholds, largest, rate, ceiling, 0, vocab_size, by_mass, vocab_size)
            low, ceiling, above = _narrowed(thresholds, reached, low, ceiling, above, wanted)
            _, count, _ = _collect(
                logits, listed, candidates, tops, largest, rate, low, ceiling, False,
                by_mass, vocab_size, num_blocks, width, capacity,
            )  # fmt: skip
            low = _settle_collected(candidates, count, largest, rate, low, above, wanted, by_mass, capacity, few)
            searching = (count > capacity) & (_index_of(ceiling) - _index_of(low) > 1)
        tl.store(brackets + LOW, low)
    if by_mass:
        smallest_share = tl.load(min_p + row)
        asks = (temperature > 0) & (largest > float("-inf")) & (largest < float("inf"))
        if asks & (smallest_share > 0.0):
            # Rounding must not throw out the likeliest itself.
            low = tl.maximum(low, tl.minimum(largest, largest + temperature * tl.log(smallest_share)))
        tl.store(floors + row, low)
