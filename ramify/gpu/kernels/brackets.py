"""The bracket that a search for a floor narrows: what lies inside, what its thresholds weigh, and the next bracket.

    low < x < ceiling          low and all above it weigh enough; what reaches the ceiling, `above`, does not

All of these are parts of the kernels in floors.py: one row, one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.race import BLOCK, COLDEST

BLOCKS_AT_ONCE = tl.constexpr(16)  # 4,096 logits
LANES = tl.constexpr(BLOCKS_AT_ONCE * BLOCK)
SAMPLE, COMPARED_AT_ONCE = tl.constexpr(512), tl.constexpr(32)
THRESHOLDS = tl.constexpr(16)  # weighed in one read
WEIGHED_AT_ONCE = tl.constexpr(1024)


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
def _middle(low: tl.tensor, top: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """A value above low and up to top, where low < top."""
    by_value = 0.5 * low + 0.5 * top
    by_index = _float_at((index_of(low) + index_of(top)) >> 1)
    middle = tl.where((turn % 2 == 0) & (by_value > low), by_value, by_index)
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
def collect(
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
        low = select(x, weights, tl.min(tl.where(lanes < count, x, float("inf")), axis=0), top, above, wanted)
    return low


@triton.jit
def sampled_thresholds(
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
def even_thresholds(low: tl.tensor, ceiling: tl.tensor) -> tl.tensor:
    """That cut the list of all float32 numbers between low and ceiling into equal parts."""
    first, last = index_of(low), index_of(ceiling)
    return _float_at(first + (last - first) * (tl.arange(0, THRESHOLDS) + 1) // (THRESHOLDS + 1))


@triton.jit
def weigh(
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
def narrowed(
    thresholds: tl.tensor, reached: tl.tensor, low: tl.tensor, ceiling: tl.tensor, above: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """The bracket after a weighing: low, ceiling, and what is above the ceiling."""
    low = tl.maximum(low, tl.max(tl.where(reached >= wanted, thresholds, float("-inf")), axis=0))
    is_short = (reached < wanted) & (thresholds > low) & (thresholds < ceiling)
    ceiling = tl.minimum(ceiling, tl.min(tl.where(is_short, thresholds, float("inf")), axis=0))
    above = tl.maximum(above, tl.max(tl.where(is_short & (thresholds == ceiling), reached, 0.0), axis=0))
    return low, ceiling, above


@triton.jit
def settle_collected(
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
def rate_of(temperature: tl.tensor) -> tl.tensor:
    return 1.0 / tl.maximum(temperature, COLDEST)
