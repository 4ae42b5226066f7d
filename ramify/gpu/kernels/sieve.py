"""The floor of a flat row, by one read of it: what a sample tells, the read, and what is left to settle.

    propose   8,192 logits, spread evenly over the vocabulary, tell which two of their values the floor surely lies
              between
    sift      one read, by many programs. What is above the bracket is weighed, what is inside is copied into segments,
              one for each program
    settle    the floor among these copies, in registers

              low ........ tie ... ceiling          low and all above it: enough; from the ceiling on: not enough

Values that very many logits have are among the sample, so they are the lower end or the tie, the last of the sample
before the ceiling: these are counted and not copied. A sample that misleads all the same is noticed, since what is
above and inside does not add up, or overflows: such a row is lost here, and searched by more reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.brackets import masses_of, middle_of, rate_of, select_among_many
from ramify.gpu.kernels.race import BLOCK

# How many standard deviations a sample may err: one row in 30,000 errs by more.
DEVIATIONS = tl.constexpr(4.0)
CLOSE = tl.constexpr(0.125)  # of what a sample may err: what an edge may be off
SNAPPING = tl.constexpr(12)  # turns of a search after which its ends become values of the sample
ROUNDING = tl.constexpr(1e-5)  # of the whole: what sums in different orders may differ by

LOW, TIE, CEILING, WANTED, LARGEST, MASS, LEAST = map(tl.constexpr, range(7))  # of a bracket
BRACKET = tl.constexpr(7)
ABOVE, MASS_ABOVE, TIES, LOWS, INSIDE = map(tl.constexpr, range(5))  # of what one program sifts
PARTS = tl.constexpr(5)
# What a row is searched by: not at all, by count (top-k) or by mass (top-p), here or, where a sample misled, elsewhere.
CLOSED, BY_COUNT, BY_MASS, LOST_COUNT, LOST_MASS = map(tl.constexpr, range(5))
LOST = tl.constexpr(2)  # from BY_… to LOST_…


@triton.jit
def propose(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    brackets: tl.tensor,
    kinds: tl.tensor,
    sample: tl.constexpr,
    neighbours: tl.constexpr,
    vocab_size: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    if (kind == BY_COUNT) | (kind == BY_MASS):
        brackets += row * BRACKET
        largest, rate = tl.load(brackets + LARGEST), rate_of(tl.load(temperatures + row))
        by_mass = kind == BY_MASS
        total = tl.where(by_mass, tl.load(brackets + MASS), vocab_size * 1.0)
        below, slack = total - tl.load(brackets + WANTED), ROUNDING * total
        ids = _sampled_ids(sample, neighbours, vocab_size)
        x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = tl.where(by_mass, masses_of(x, largest, rate), 1.0)
        weights = tl.where(ids < vocab_size, weights, 0.0)
        low = tl.load(brackets + LOW)
        low = tl.maximum(low, _edge(x, weights, largest, rate, by_mass, below - slack, 1, vocab_size))
        tie = tl.maximum(low, _edge(x, weights, largest, rate, by_mass, below + slack, -1, vocab_size))
        tl.store(brackets + LOW, low)
        tl.store(brackets + TIE, tie)
        tl.store(brackets + CEILING, tl.min(tl.where(x > tie, x, float("inf")), axis=0))


@triton.jit
def _sampled_ids(sample: tl.constexpr, neighbours: tl.constexpr, vocab_size: tl.constexpr) -> tl.tensor:
    """(sample,): a few neighbours, which memory reads at once, evenly spread; or all ids, and more, of a small row."""
    lanes = tl.arange(0, sample).to(tl.int64)
    if vocab_size <= sample:
        return lanes
    groups: tl.constexpr = sample // neighbours
    return lanes // neighbours * vocab_size // groups // neighbours * neighbours + lanes % neighbours


@triton.jit
def _edge(
    x: tl.tensor,
    weights: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    by_mass: tl.tensor,
    allowed: tl.tensor,
    side: tl.constexpr,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """The largest of a sample below which, in the whole row, at most `allowed` lies; minus infinity if there is none.

    Surely so (side 1, or a little less), or possibly so (side -1, or a little more): within what a sample of this size
    may err. What is below a value weighs no more than it each, whatever is above: even rows with a few heavy tokens are
    told well from below.
    """
    low = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    top = tl.max(x, axis=0)
    found = tl.full((), float("-inf"), tl.float32)
    below_low, below_high = tl.full((), 0.0, tl.float32), tl.full((), float("inf"), tl.float32)
    excess, spread = _excess(below_low, low, largest, rate, by_mass, allowed, side, x.shape[0], vocab_size)
    if (excess <= 0.0) & (low <= top):
        high = tl.full((), float("inf"), tl.float32)  # where there is too much below, or nothing of the sample above
        turn = 0
        while (low < top) & (below_high - below_low > CLOSE * spread):
            middle = middle_of(low, top, turn)
            below = tl.sum(tl.where(x >= middle, 0.0, weights), axis=0)
            excess, spread = _excess(below, middle, largest, rate, by_mass, allowed, side, x.shape[0], vocab_size)
            if excess <= 0.0:
                low = middle
                below_low = below
            else:
                high = middle
                top = middle
                below_high = below
            turn += 1
            if turn % SNAPPING == 0:  # a value that very many have is all that is left, sooner or later
                low = tl.min(tl.where(x >= low, x, float("inf")), axis=0)
                top = tl.max(tl.where(x < high, x, float("-inf")), axis=0)
        if side > 0:
            found = tl.min(tl.where(x >= low, x, float("inf")), axis=0)
        else:
            found = tl.max(tl.where(x < high, x, float("-inf")), axis=0)
    return found


@triton.jit
def _excess(
    below: tl.tensor,
    value: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    by_mass: tl.tensor,
    allowed: tl.tensor,
    side: tl.constexpr,
    size: tl.constexpr,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """By how much the row may have more below a value than is allowed, by what a sample has; how far that may err."""
    sampled: tl.constexpr = size if size < vocab_size else vocab_size
    each: tl.constexpr = vocab_size / sampled  # logits that one of the sample stands for
    weight = tl.where(by_mass, masses_of(value, largest, rate), 1.0)
    # Wilson's interval: a variance as if all below weighed as much as the value, which is the most they can. A sample
    # that is nearly the whole row errs by less.
    unit = each * weight * (1.0 - sampled / vocab_size)
    whole = each * below
    left = tl.maximum(1.0 - whole / tl.maximum(vocab_size * weight, 1e-30), 0.0)
    half = 0.5 * DEVIATIONS * unit
    spread = DEVIATIONS * tl.sqrt(unit * whole * left + half * half)
    return whole + DEVIATIONS * half + side * spread - allowed, spread / each


@triton.jit
def sift(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    brackets: tl.tensor,
    kinds: tl.tensor,
    parts: tl.tensor,
    copies: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    splits: tl.constexpr,
    segment: tl.constexpr,
    splits_each: tl.constexpr,
) -> None:
    """Split by split. A split has every so manieth block of a row: neighbours in a vocabulary are alike."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    if (kind == BY_COUNT) | (kind == BY_MASS):
        brackets += row * BRACKET
        low, tie, ceiling = tl.load(brackets + LOW), tl.load(brackets + TIE), tl.load(brackets + CEILING)
        tie = tl.where(tie > low, tie, float("inf"))  # else it is counted as low
        largest, rate = tl.load(brackets + LARGEST), rate_of(tl.load(temperatures + row))
        for number in range(splits_each):
            split = tl.program_id(1) * splits_each + number
            _sift_split(
                logits + row * logits_stride, parts + row * PARTS * splits + split,
                copies + (row * splits + split) * segment,
                split, kind, low, tie, ceiling, largest, rate, vocab_size, num_blocks, splits, segment,
            )  # fmt: skip


@triton.jit
def _sift_split(
    logits: tl.tensor,
    parts: tl.tensor,
    copies: tl.tensor,
    split: tl.tensor,
    kind: tl.tensor,
    low: tl.tensor,
    tie: tl.tensor,
    ceiling: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    splits: tl.constexpr,
    segment: tl.constexpr,
) -> None:
    """A thread has one place in every block: no number passes from thread to thread but once, for the copies."""
    lane = tl.arange(0, BLOCK)
    steps: tl.constexpr = (num_blocks + splits - 1) // splits
    whole: tl.constexpr = vocab_size // BLOCK // splits  # steps in which every split has a whole block
    mass_above = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)  # of above, ties, lows, inside: a byte each
    for step in tl.static_range(steps):
        x = _logits_at(logits, split, lane, step, step < whole, vocab_size, splits)
        is_above = x >= ceiling
        mass_above += tl.where(is_above, masses_of(x, largest, rate), 0.0)
        below = tl.where(x > low, 1 << 24, tl.where(x == low, 1 << 16, 0))
        counts += tl.where(is_above, 1, tl.where(x == tie, 1 << 8, below))
    inside = counts >> 24
    num_inside = tl.sum(inside, axis=0)
    mass, above = tl.sum(mass_above, axis=0), tl.sum(counts & 0xFF, axis=0).to(tl.float32)
    lows = tl.sum((counts >> 16) & 0xFF, axis=0)
    if steps > whole:  # what is read beyond the vocabulary is minus infinity, which low may be
        lows = tl.where(low > float("-inf"), lows, 0)
    tl.store(parts + ABOVE * splits, tl.where(kind == BY_MASS, mass, above))
    tl.store(parts + MASS_ABOVE * splits, mass)
    tl.store(parts + TIES * splits, tl.sum((counts >> 8) & 0xFF, axis=0).to(tl.float32))
    tl.store(parts + LOWS * splits, lows.to(tl.float32))
    tl.store(parts + INSIDE * splits, num_inside.to(tl.float32))
    if num_inside <= segment:
        # They are read again, out of the nearest cache.
        target = tl.cumsum(inside, axis=0) - inside
        for step in tl.static_range(steps):
            x = _logits_at(logits, split, lane, step, step < whole, vocab_size, splits)
            is_inside = (x > low) & (x < ceiling) & (x != tie)
            tl.store(copies + target, x, mask=is_inside)
            target += is_inside.to(tl.int32)


@triton.jit
def _logits_at(
    logits: tl.tensor,
    split: tl.tensor,
    lane: tl.tensor,
    step: tl.constexpr,
    is_whole: tl.constexpr,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
) -> tl.tensor:
    place = logits + split * BLOCK + lane + step * splits * BLOCK
    if is_whole:
        return tl.load(place)
    return tl.load(place, mask=split * BLOCK + lane + step * splits * BLOCK < vocab_size, other=float("-inf"))


@triton.jit
def settle(
    temperatures: tl.tensor,
    top_p: tl.tensor,
    brackets: tl.tensor,
    kinds: tl.tensor,
    parts: tl.tensor,
    copies: tl.tensor,
    splits: tl.constexpr,
    segment: tl.constexpr,
) -> None:
    """Leaves the floor as low. Rows that are searched by mass next have what is wanted of that, too."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    if (kind == BY_COUNT) | (kind == BY_MASS):
        brackets += row * BRACKET
        parts += row * PARTS * splits
        copies += row * splits * segment
        rate, p = rate_of(tl.load(temperatures + row)), tl.load(top_p + row)
        most = tl.max(tl.load(parts + INSIDE * splits + tl.arange(0, splits)), axis=0)
        if most <= segment // 2:
            _settle_copies(brackets, kinds + row, parts, copies, kind, rate, p, segment // 2, splits, segment)
        elif most <= segment:
            _settle_copies(brackets, kinds + row, parts, copies, kind, rate, p, segment, splits, segment)
        else:
            tl.store(kinds + row, kind + LOST)


@triton.jit
def _settle_copies(
    brackets: tl.tensor,
    kind_of_row: tl.tensor,
    parts: tl.tensor,
    copies: tl.tensor,
    kind: tl.tensor,
    rate: tl.tensor,
    p: tl.tensor,
    size: tl.constexpr,
    splits: tl.constexpr,
    segment: tl.constexpr,
) -> None:
    """From the first `size` of each segment."""
    programs = tl.arange(0, splits)
    low, tie = tl.load(brackets + LOW), tl.load(brackets + TIE)
    wanted, largest = tl.load(brackets + WANTED), tl.load(brackets + LARGEST)
    by_mass, has_tie = kind == BY_MASS, tie > low
    tie = tl.where(has_tie, tie, float("inf"))
    above = tl.sum(tl.load(parts + ABOVE * splits + programs), axis=0)
    ties = tl.where(has_tie, tl.sum(tl.load(parts + TIES * splits + programs), axis=0), 0.0)
    lows = tl.sum(tl.load(parts + LOWS * splits + programs), axis=0)
    tie_mass = ties * tl.where(has_tie, masses_of(tie, largest, rate), 0.0)
    low_mass = tl.where(lows > 0, lows * masses_of(low, largest, rate), 0.0)

    x = _copied(parts, copies, size, splits, segment)
    weights = tl.where(x > float("-inf"), tl.where(by_mass, masses_of(x, largest, rate), 1.0), 0.0)
    over_tie = tl.sum(tl.where(x > tie, weights, 0.0), axis=0)
    is_over = above + over_tie >= wanted
    outside = above + tl.where(is_over, 0.0, over_tie + tl.where(by_mass, tie_mass, ties))
    is_tie = outside >= wanted
    # None of the copies is the tie itself: the floor is it, or among those on one of its sides.
    x = tl.where(is_over, tl.where(x > tie, x, float("-inf")), tl.where(x < tie, x, float("-inf")))
    weights = tl.where(x > float("-inf"), weights, 0.0)
    reached = outside + tl.sum(weights, axis=0)
    is_copied = (reached >= wanted) & (outside < wanted)
    floor = tl.where(is_tie, tie, low)
    if is_copied:
        lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
        floor = select_among_many(x, weights, lowest, tl.max(x, axis=0), outside, wanted)
    is_low = (reached + tl.where(by_mass, low_mass, lows) >= wanted) | (low == float("-inf"))
    if (is_tie | is_copied | is_low) & (above < wanted):
        if (not by_mass) & (p < 1.0):
            left = tl.sum(tl.load(parts + MASS_ABOVE * splits + programs), axis=0)
            x = _copied(parts, copies, size, splits, segment)
            left += tl.sum(tl.where((x >= floor) & (x > float("-inf")), masses_of(x, largest, rate), 0.0), axis=0)
            left += tl.where(tie >= floor, tie_mass, 0.0) + tl.where(low >= floor, low_mass, 0.0)
            tl.store(brackets + WANTED, p * left)
            tl.store(brackets + LEAST, floor)
            tl.store(kind_of_row, BY_MASS)
        else:
            tl.store(kind_of_row, CLOSED)
        tl.store(brackets + LOW, floor)
    else:
        tl.store(kind_of_row, kind + LOST)


@triton.jit
def _copied(
    parts: tl.tensor, copies: tl.tensor, size: tl.constexpr, splits: tl.constexpr, segment: tl.constexpr
) -> tl.tensor:
    """(splits x size,) float32, minus infinity where there is no copy."""
    programs, lanes = tl.arange(0, splits), tl.arange(0, size)
    inside = tl.load(parts + INSIDE * splits + programs)
    is_copy = lanes[None, :] < inside[:, None]
    x = tl.load(copies + programs[:, None] * segment + lanes[None, :], mask=is_copy, other=float("-inf"))
    return tl.reshape(x, (splits * size,), can_reorder=True)
