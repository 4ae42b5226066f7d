"""The kernels of `cuda/mixture.py`, which says what each is for.

Numbers of a row are float64, and so is the log-ratio until it is rounded once. Sums of a split are relative to the
largest exponent among its ids, which comes first:

    seek, refine, weigh    largest, Σ e, Σ e d, Σ e d², and over d > 0 alone: Σ e d, Σ e d²; weigh adds the log-sum-exps
                           at −α and 2 − α
    seek for ess_balance   largest, Σ e, Σ e d at −α; the same at 2 − α
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_SUMS = 16
# What holds for the whole search of a row.
NUM_FACTS = 16
LARGEST = tl.constexpr(0)  # of theta
CENTRE = tl.constexpr(1)  # ratio = teacher − theta − centre, in float32
REST = tl.constexpr(2)  # d = ratio − rest
LOG_SUM_THETA = tl.constexpr(3)  # relative to LARGEST
SPAN = tl.constexpr(4)
THETA_ALONE = tl.constexpr(5)
TEACHER_ALONE = tl.constexpr(6)
DISJOINT = tl.constexpr(7)
SOUND = tl.constexpr(8)
NORMALISER_TEACHER = tl.constexpr(9)
# Where its search stands: α, the bracket's two ends as (place, value, slope), and what is decided.
NUM_STATES = 16
ALPHA = tl.constexpr(0)
LOW = tl.constexpr(1)
HIGH = tl.constexpr(4)
ARRIVED = tl.constexpr(7)
SOUGHT = tl.constexpr(8)
CLAMPED = tl.constexpr(9)
# What is told of it in the end.
NUM_NUMBERS = 11

SMALL = tl.constexpr(8.0)
IDENTICAL = tl.constexpr(1e-4)
SLACK = tl.constexpr(1e-4)
EDGE = tl.constexpr(1e-6)


@triton.jit
def _load(theta: tl.tensor, teacher: tl.tensor, ids: tl.tensor, vocab_size: tl.constexpr) -> tl.tensor:
    s = tl.load(theta + ids, mask=ids < vocab_size, other=float("-inf"))
    t = tl.load(teacher + ids, mask=ids < vocab_size, other=float("-inf"))
    return s, t, (s > float("-inf")) & (t > float("-inf"))


@triton.jit
def _finite(largest: tl.tensor) -> tl.tensor:
    """What exponents are measured from: nothing has been seen yet at minus infinity."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _ratio(s: tl.tensor, t: tl.tensor, both: tl.tensor, centre: tl.tensor) -> tl.tensor:
    return tl.where(both, (t.to(tl.float64) - s.to(tl.float64) - centre).to(tl.float32), 0.0)


@triton.jit
def _total(x: tl.tensor) -> tl.tensor:
    return tl.sum(x, axis=0).to(tl.float64)


@triton.jit
def _column(sums: tl.tensor, column: tl.constexpr, splits: tl.constexpr, width: tl.constexpr, other: tl.constexpr):  # type: ignore[no-untyped-def]
    """One number of every split of a row, (width,); `sums` points at the row's first. 16 numbers a split."""
    places = tl.arange(0, width)
    return tl.load(sums + places * 16 + column, mask=places < splits, other=other)


@triton.jit
def _scales(largest: tl.tensor) -> tl.tensor:
    """The largest of all splits, and by what each split's sums are multiplied to be relative to it."""
    top = tl.max(largest, axis=0)
    return top, tl.where(largest > float("-inf"), tl.exp(largest - _finite(top)), 0.0)


@triton.jit
def _log_add(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    top = _finite(tl.maximum(a, b))
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def survey(
    theta: tl.tensor,
    teacher: tl.tensor,
    theta_stride: tl.tensor,
    teacher_stride: tl.tensor,
    surveyed: tl.tensor,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    theta += row * theta_stride
    teacher += row * teacher_stride
    # Of what both allow, under each model: largest, Σ e, Σ e (t − s); of what one alone allows: largest, Σ e.
    top_s = tl.full((), float("-inf"), tl.float64)
    top_t, alone_s, alone_t, highest = top_s, top_s, top_s, top_s
    sum_s = tl.full((), 0.0, tl.float64)
    mean_s, sum_t, mean_t, alone_sum_s, alone_sum_t, faults = sum_s, sum_s, sum_s, sum_s, sum_s, sum_s
    lowest = tl.full((), float("inf"), tl.float64)
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = _load(theta, teacher, ids, vocab_size)
        d = tl.where(both, t - s, 0.0)
        lowest = tl.minimum(lowest, tl.min(tl.where(both, d, float("inf")), axis=0).to(tl.float64))
        highest = tl.maximum(highest, tl.max(tl.where(both, d, float("-inf")), axis=0).to(tl.float64))
        # What is not below infinity is infinite or NaN.
        faults += _total(((s < float("inf")) & (t < float("inf")) == 0).to(tl.float32))

        top = tl.maximum(top_s, tl.max(tl.where(both, s, float("-inf")), axis=0).to(tl.float64))
        e = tl.where(both, tl.exp(s - _finite(top).to(tl.float32)), 0.0)
        keep = tl.exp(top_s - _finite(top))
        sum_s, mean_s, top_s = sum_s * keep + _total(e), mean_s * keep + _total(e * d), top

        top = tl.maximum(top_t, tl.max(tl.where(both, t, float("-inf")), axis=0).to(tl.float64))
        e = tl.where(both, tl.exp(t - _finite(top).to(tl.float32)), 0.0)
        keep = tl.exp(top_t - _finite(top))
        sum_t, mean_t, top_t = sum_t * keep + _total(e), mean_t * keep + _total(e * d), top

        only = (s > float("-inf")) & (t == float("-inf"))
        top = tl.maximum(alone_s, tl.max(tl.where(only, s, float("-inf")), axis=0).to(tl.float64))
        e = tl.where(only, tl.exp(s - _finite(top).to(tl.float32)), 0.0)
        alone_sum_s, alone_s = alone_sum_s * tl.exp(alone_s - _finite(top)) + _total(e), top

        only = (t > float("-inf")) & (s == float("-inf"))
        top = tl.maximum(alone_t, tl.max(tl.where(only, t, float("-inf")), axis=0).to(tl.float64))
        e = tl.where(only, tl.exp(t - _finite(top).to(tl.float32)), 0.0)
        alone_sum_t, alone_t = alone_sum_t * tl.exp(alone_t - _finite(top)) + _total(e), top
    out = surveyed + (row * splits + part) * 16
    tl.store(out + 0, top_s)
    tl.store(out + 1, sum_s)
    tl.store(out + 2, mean_s)
    tl.store(out + 3, top_t)
    tl.store(out + 4, sum_t)
    tl.store(out + 5, mean_t)
    tl.store(out + 6, alone_s)
    tl.store(out + 7, alone_sum_s)
    tl.store(out + 8, alone_t)
    tl.store(out + 9, alone_sum_t)
    tl.store(out + 10, lowest)
    tl.store(out + 11, highest)
    tl.store(out + 12, faults)


@triton.jit
def _merged(surveyed: tl.tensor, column: tl.constexpr, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """(largest, Σ e, Σ e d) of a row from three columns of its survey."""
    top, scales = _scales(_column(surveyed, column, splits, width, float("-inf")))
    total = tl.sum(scales * _column(surveyed, column + 1, splits, width, 0.0), axis=0)
    mean = tl.sum(scales * _column(surveyed, column + 2, splits, width, 0.0), axis=0)
    return top, total, mean


@triton.jit
def _is_small(surveyed: tl.tensor, centre: tl.tensor, splits: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    highest = tl.max(_column(surveyed, 11, splits, width, float("-inf")), axis=0)
    alone = tl.maximum(
        tl.max(_column(surveyed, 6, splits, width, float("-inf")), axis=0),
        tl.max(_column(surveyed, 8, splits, width, float("-inf")), axis=0),
    )
    return (highest - centre < SMALL) & (alone == float("-inf"))


@triton.jit
def _expm1(x: tl.tensor) -> tl.tensor:
    near = x / 8
    for place in tl.static_range(7, 1, -1):
        near = (1.0 + near) * x / place
    return tl.where(tl.abs(x) < 0.5, (1.0 + near) * x, tl.exp(x) - 1.0)


@triton.jit
def grow(
    theta: tl.tensor,
    teacher: tl.tensor,
    theta_stride: tl.tensor,
    teacher_stride: tl.tensor,
    surveyed: tl.tensor,
    grown: tl.tensor,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    theta += row * theta_stride
    teacher += row * teacher_stride
    surveyed += row * splits * 16
    top, total, mean = _merged(surveyed, 0, splits, width)
    centre = (mean / total).to(tl.float32).to(tl.float64)
    growth = tl.full((), 0.0, tl.float64)
    if _is_small(surveyed, centre, splits, width):
        for start in range(0, split, block):
            ids = part * split + start + tl.arange(0, block)
            s, t, both = _load(theta, teacher, ids, vocab_size)
            ratio = tl.minimum(_ratio(s, t, both, centre), SMALL)
            growth += _total(tl.where(both, tl.exp(s - top.to(tl.float32)) * _expm1(ratio), 0.0))
    tl.store(grown + row * splits + part, growth)


@triton.jit
def _crossing(low: tl.tensor, low_value, low_slope, high, high_value, high_slope):  # type: ignore[no-untyped-def]
    """Where two tangents meet; halfway if rounding puts that outside."""
    place = ((low_value - low_slope * low) - (high_value - high_slope * high)) / (high_slope - low_slope)
    return tl.where((place > low) & (place < high), place, (low + high) / 2)


@triton.jit
def _start(value_low, slope_low, value_high, slope_high, is_half, differ):  # type: ignore[no-untyped-def]
    """Where the search for KL symmetry begins, and whether that is its end: see `sampling.alpha.kl_symmetry`."""
    one = tl.full((), 1.0, tl.float64)
    stays_low, stays_high = differ & (slope_low >= 0), differ & (slope_high <= 0)
    alpha = _crossing(one - 1, value_low, slope_low, one, value_high, slope_high)
    alpha = tl.where(is_half, 0.5, alpha)
    alpha = tl.where(stays_low, EDGE, tl.where(stays_high, 1.0 - EDGE, alpha)).to(tl.float32).to(tl.float64)
    return alpha, is_half | stays_low | stays_high


@triton.jit
def _keep(out, alpha, low, low_value, low_slope, high, high_value, high_slope, arrived, sought):  # type: ignore[no-untyped-def]
    tl.store(out + ALPHA, alpha)
    tl.store(out + LOW, low)
    tl.store(out + LOW + 1, low_value)
    tl.store(out + LOW + 2, low_slope)
    tl.store(out + HIGH, high)
    tl.store(out + HIGH + 1, high_value)
    tl.store(out + HIGH + 2, high_slope)
    tl.store(out + ARRIVED, arrived)
    tl.store(out + SOUGHT, sought)


@triton.jit
def settle(
    surveyed: tl.tensor,
    grown: tl.tensor,
    given: tl.tensor,
    facts: tl.tensor,
    states: tl.tensor,
    has_given: tl.constexpr,
    is_balance: tl.constexpr,
    splits: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    surveyed += row * splits * 16
    facts += row * 16
    states += row * 16
    top_s, sum_s, mean_s = _merged(surveyed, 0, splits, width)
    top_t, sum_t, mean_t = _merged(surveyed, 3, splits, width)
    alone_s, scales = _scales(_column(surveyed, 6, splits, width, float("-inf")))
    alone_sum_s = tl.sum(scales * _column(surveyed, 7, splits, width, 0.0), axis=0)
    alone_t, scales = _scales(_column(surveyed, 8, splits, width, float("-inf")))
    alone_sum_t = tl.sum(scales * _column(surveyed, 9, splits, width, 0.0), axis=0)
    lowest = tl.min(_column(surveyed, 10, splits, width, float("inf")), axis=0)
    highest = tl.max(_column(surveyed, 11, splits, width, float("-inf")), axis=0)
    faults = tl.sum(_column(surveyed, 12, splits, width, 0.0), axis=0)

    largest = tl.maximum(top_s, alone_s)
    shared_s, shared_t = top_s + tl.log(sum_s), top_t + tl.log(sum_t)
    whole_s = tl.where(alone_sum_s > 0, _log_add(shared_s, alone_s + tl.log(alone_sum_s)), shared_s)
    whole_t = tl.where(alone_sum_t > 0, _log_add(shared_t, alone_t + tl.log(alone_sum_t)), shared_t)
    centre = (mean_s / sum_s).to(tl.float32).to(tl.float64)
    places = tl.arange(0, width)
    growth = tl.sum(tl.load(grown + row * splits + places, mask=places < splits, other=0.0), axis=0)
    rest = tl.where(
        _is_small(surveyed, centre, splits, width), tl.log(1.0 + growth / sum_s), whole_t - whole_s - centre
    )
    most = rest.to(tl.float32).to(tl.float64)
    centre, rest = centre + most, rest - most
    span = tl.maximum(centre - lowest, highest - centre)
    disjoint = top_s == float("-inf")
    tl.store(facts + LARGEST, largest)
    tl.store(facts + CENTRE, centre)
    tl.store(facts + REST, rest)
    tl.store(facts + LOG_SUM_THETA, whole_s - largest)
    tl.store(facts + SPAN, span)
    tl.store(facts + THETA_ALONE, (alone_sum_s > 0).to(tl.float64))
    tl.store(facts + TEACHER_ALONE, (alone_sum_t > 0).to(tl.float64))
    tl.store(facts + DISJOINT, disjoint.to(tl.float64))
    tl.store(facts + SOUND, (faults == 0).to(tl.float64))
    tl.store(facts + NORMALISER_TEACHER, whole_t)

    one = tl.full((), 1.0, tl.float64)
    value_low, value_high = shared_s - whole_s, shared_t - whole_t
    slope_low, slope_high = mean_s / sum_s - centre - rest, mean_t / sum_t - centre - rest
    is_half = (span <= IDENTICAL) | disjoint
    if has_given:
        alpha, arrived = tl.load(given + row), one > 0
    elif is_balance:
        alpha, arrived = one / 2, is_half
    else:
        differ = (alone_sum_s > 0) | (alone_sum_t > 0)
        alpha, arrived = _start(value_low, slope_low, value_high, slope_high, is_half, differ)
    arrived = arrived.to(tl.float64)
    _keep(states, alpha, one - 1, value_low, slope_low, one, value_high, slope_high, arrived, 1 - arrived)


@triton.jit
def _moments(sums: tl.tensor, rest: tl.tensor, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """log Σ e, and of d: the mean, the mean square, and the parts of both with d > 0."""
    top, scales = _scales(_column(sums, 0, splits, width, float("-inf")))
    total = tl.sum(scales * _column(sums, 1, splits, width, 0.0), axis=0)
    mean = tl.sum(scales * _column(sums, 2, splits, width, 0.0), axis=0) / total - rest
    square = tl.sum(scales * _column(sums, 3, splits, width, 0.0), axis=0) / total
    rise = tl.sum(scales * _column(sums, 4, splits, width, 0.0), axis=0) / total
    rise_square = tl.sum(scales * _column(sums, 5, splits, width, 0.0), axis=0) / total
    return top + tl.log(total), mean, square, rise, rise_square


@triton.jit
def _correction(mean: tl.tensor, square: tl.tensor, rise: tl.tensor, rise_square: tl.tensor) -> tl.tensor:
    """See `sampling.alpha.correction`."""
    fall, fall_square = rise - mean, square - rise_square
    fall = tl.where(fall > 1e-5 * rise, fall, float("nan"))
    return -(tl.log(rise) - tl.log(fall)) / (rise_square / rise + fall_square / fall)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    facts, state, sums, is_balance: tl.constexpr, splits: tl.constexpr, width: tl.constexpr
):
    """The state after the one whose sums these are; the same if it had arrived."""
    alpha, arrived = tl.load(state + ALPHA), tl.load(state + ARRIVED)
    low, low_value, low_slope = tl.load(state + LOW), tl.load(state + LOW + 1), tl.load(state + LOW + 2)
    high, high_value, high_slope = tl.load(state + HIGH), tl.load(state + HIGH + 1), tl.load(state + HIGH + 2)
    if arrived == 0:
        rest, span = tl.load(facts + REST), tl.load(facts + SPAN)
        if is_balance:
            before, scales = _scales(_column(sums, 0, splits, width, float("-inf")))
            total = tl.sum(scales * _column(sums, 1, splits, width, 0.0), axis=0)
            mean_before = tl.sum(scales * _column(sums, 2, splits, width, 0.0), axis=0) / total
            before = before + tl.log(total)
            beyond, scales = _scales(_column(sums, 3, splits, width, float("-inf")))
            total = tl.sum(scales * _column(sums, 4, splits, width, 0.0), axis=0)
            mean_beyond = tl.sum(scales * _column(sums, 5, splits, width, 0.0), axis=0) / total
            beyond = beyond + tl.log(total)
            excess = before - beyond + 2.0 * rest
            low, high = tl.where(excess < 0, alpha, low), tl.where(excess < 0, high, alpha)
            step = alpha - excess / tl.maximum(mean_beyond - mean_before, 1e-300)
            inside = (step >= low) & (step <= high)
            following = tl.where(inside, step, (low + high) / 2).to(tl.float32).to(tl.float64)
            arrived = (tl.abs(following - alpha) <= 1e-7).to(tl.float64)
            alpha = following
        else:
            log_sum, mean, square, rise, rise_square = _moments(sums, rest, splits, width)
            value = log_sum - tl.load(facts + LOG_SUM_THETA) - alpha * rest
            is_low = mean < 0
            low, high = tl.where(is_low, alpha, low), tl.where(is_low, high, alpha)
            low_value, high_value = tl.where(is_low, value, low_value), tl.where(is_low, high_value, value)
            low_slope, high_slope = tl.where(is_low, mean, low_slope), tl.where(is_low, high_slope, mean)
            step = alpha + _correction(mean, square, rise, rise_square)
            inside = (step >= low) & (step <= high)
            crossing = _crossing(low, low_value, low_slope, high, high_value, high_slope)
            following = tl.where(inside, step, crossing).to(tl.float32).to(tl.float64)
            is_root = tl.abs(mean) <= 1e-7 * span * tl.minimum(1.0 + span / 16, 10.0)
            is_near = inside & (mean * mean <= 1e-7 * tl.maximum(square - mean * mean, 0.0))
            alpha = tl.where(is_root & (is_near == 0), alpha, following)
            arrived = (is_root | is_near).to(tl.float64)
    return alpha, low, low_value, low_slope, high, high_value, high_slope, arrived


@triton.jit
def _log_sum_at(  # type: ignore[no-untyped-def]
    top, total, mean, base, ratio, both, beta
):
    """Σ e and Σ e d at one β, relative to the largest exponent so far, with these ids added."""
    x = tl.where(both, base + beta.to(tl.float32) * ratio, float("-inf"))
    following = tl.maximum(top, tl.max(x, axis=0).to(tl.float64))
    e = tl.where(both, tl.exp(x - _finite(following).to(tl.float32)), 0.0)
    keep = tl.exp(top - _finite(following))
    return following, total * keep + _total(e), mean * keep + _total(e * ratio)


@triton.jit
def seek(
    theta: tl.tensor,
    teacher: tl.tensor,
    theta_stride: tl.tensor,
    teacher_stride: tl.tensor,
    facts: tl.tensor,
    states: tl.tensor,
    sums: tl.tensor,
    new_states: tl.tensor,
    new_sums: tl.tensor,
    is_first: tl.constexpr,
    is_balance: tl.constexpr,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    theta += row * theta_stride
    teacher += row * teacher_stride
    facts += row * 16
    states += row * 16
    if is_first:
        alpha, arrived = tl.load(states + ALPHA), tl.load(states + ARRIVED)
    else:
        alpha, low, low_value, low_slope, high, high_value, high_slope, arrived = _advance(
            facts, states, sums + row * splits * 16, is_balance, splits, width
        )
        if part == 0:
            sought = tl.load(states + SOUGHT)
            _keep(
                new_states + row * 16, alpha, low, low_value, low_slope, high, high_value, high_slope, arrived, sought
            )
    if arrived == 0:
        centre, largest = tl.load(facts + CENTRE), tl.load(facts + LARGEST).to(tl.float32)
        out = new_sums + (row * splits + part) * 16
        top = tl.full((), float("-inf"), tl.float64)
        total = tl.full((), 0.0, tl.float64)
        mean, square, rise, rise_square = total, total, total, total
        beyond, beyond_total, beyond_mean = top, total, total
        for start in range(0, split, block):
            ids = part * split + start + tl.arange(0, block)
            s, t, both = _load(theta, teacher, ids, vocab_size)
            ratio, base = _ratio(s, t, both, centre), s - largest
            if is_balance:
                top, total, mean = _log_sum_at(top, total, mean, base, ratio, both, -alpha)
                beyond, beyond_total, beyond_mean = _log_sum_at(
                    beyond, beyond_total, beyond_mean, base, ratio, both, 2.0 - alpha
                )
            else:
                x = tl.where(both, base + alpha.to(tl.float32) * ratio, float("-inf"))
                following = tl.maximum(top, tl.max(x, axis=0).to(tl.float64))
                e = tl.where(both, tl.exp(x - _finite(following).to(tl.float32)), 0.0)
                keep = tl.exp(top - _finite(following))
                weighted = e * ratio
                up = tl.maximum(weighted, 0.0)
                total, mean = total * keep + _total(e), mean * keep + _total(weighted)
                square = square * keep + _total(weighted * ratio)
                rise, rise_square = rise * keep + _total(up), rise_square * keep + _total(up * ratio)
                top = following
        tl.store(out + 0, top)
        tl.store(out + 1, total)
        tl.store(out + 2, mean)
        if is_balance:
            tl.store(out + 3, beyond)
            tl.store(out + 4, beyond_total)
            tl.store(out + 5, beyond_mean)
        else:
            tl.store(out + 3, square)
            tl.store(out + 4, rise)
            tl.store(out + 5, rise_square)


@triton.jit
def _within(alpha: tl.tensor, alpha_min: tl.constexpr, alpha_max: tl.constexpr) -> tl.tensor:
    # A bare number would be rounded to float32 on its way.
    return tl.minimum(tl.maximum(alpha, tl.full((), alpha_min, tl.float64)), tl.full((), alpha_max, tl.float64))


@triton.jit
def bound(
    facts: tl.tensor,
    states: tl.tensor,
    sums: tl.tensor,
    forced: tl.tensor,
    bounded: tl.tensor,
    alpha_min: tl.constexpr,
    alpha_max: tl.constexpr,
    is_sought: tl.constexpr,
    is_balance: tl.constexpr,
    splits: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """The search's last step, then its bounds and the teacher's rights; SOUGHT is now: may be refined."""
    row = tl.program_id(0).to(tl.int64)
    facts += row * 16
    states += row * 16
    bounded += row * 16
    alpha = tl.load(states + ALPHA)
    if is_sought:
        alpha, _, _, _, _, _, _, _ = _advance(facts, states, sums + row * splits * 16, is_balance, splits, width)
    is_forced = tl.load(forced + row) != 0
    inside = _within(alpha, alpha_min, alpha_max)
    clamped = (inside != alpha) & (is_forced == 0)
    tl.store(bounded + ALPHA, tl.where(is_forced, 1.0, inside))
    tl.store(bounded + CLAMPED, clamped.to(tl.float64))
    tl.store(bounded + SOUGHT, tl.where(is_forced | clamped, 0.0, tl.load(states + SOUGHT)))


@triton.jit
def _exact(s: tl.tensor, t: tl.tensor, both: tl.tensor, alpha: tl.tensor) -> tl.tensor:
    """(1 − α) s + α t in float64: the two may be hundreds, and their sum near nothing."""
    x = (1.0 - alpha) * tl.where(both, s, 0.0).to(tl.float64) + alpha * tl.where(both, t, 0.0).to(tl.float64)
    return tl.where(both, x, float("-inf"))


@triton.jit
def refine(
    theta: tl.tensor,
    teacher: tl.tensor,
    theta_stride: tl.tensor,
    teacher_stride: tl.tensor,
    facts: tl.tensor,
    states: tl.tensor,
    refined: tl.tensor,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    theta += row * theta_stride
    teacher += row * teacher_stride
    alpha, centre = tl.load(states + row * 16 + ALPHA), tl.load(facts + row * 16 + CENTRE)
    out = refined + (row * splits + part) * 16
    top = tl.full((), float("-inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    mean, square, rise, rise_square = total, total, total, total
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = _load(theta, teacher, ids, vocab_size)
        ratio, x = _ratio(s, t, both, centre), _exact(s, t, both, alpha)
        following = tl.maximum(top, tl.max(x, axis=0))
        e = tl.where(both, tl.exp((x - _finite(following)).to(tl.float32)), 0.0)
        keep = tl.exp(top - _finite(following))
        weighted = e * ratio
        up = tl.maximum(weighted, 0.0)
        total, mean = total * keep + _total(e), mean * keep + _total(weighted)
        square = square * keep + _total(weighted * ratio)
        rise, rise_square = rise * keep + _total(up), rise_square * keep + _total(up * ratio)
        top = following
    tl.store(out + 0, top)
    tl.store(out + 1, total)
    tl.store(out + 2, mean)
    tl.store(out + 3, square)
    tl.store(out + 4, rise)
    tl.store(out + 5, rise_square)


@triton.jit
def weigh(
    theta: tl.tensor,
    teacher: tl.tensor,
    theta_stride: tl.tensor,
    teacher_stride: tl.tensor,
    facts: tl.tensor,
    states: tl.tensor,
    refined: tl.tensor,
    weighed: tl.tensor,
    alpha_min: tl.constexpr,
    alpha_max: tl.constexpr,
    refines: tl.constexpr,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    theta += row * theta_stride
    teacher += row * teacher_stride
    facts += row * 16
    alpha, centre = tl.load(states + row * 16 + ALPHA), tl.load(facts + CENTRE)
    if refines and tl.load(states + row * 16 + SOUGHT) != 0:
        _, mean, square, rise, rise_square = _moments(refined + row * splits * 16, tl.load(facts + REST), splits, width)
        step = _correction(mean, square, rise, rise_square)
        step = tl.where(tl.abs(step) >= 0, tl.minimum(tl.maximum(step, -SLACK), SLACK), 0.0)  # NaN: stay
        alpha = _within(alpha + step, alpha_min, alpha_max)
    largest = tl.load(facts + LARGEST).to(tl.float32)
    out = weighed + (row * splits + part) * 16
    top = tl.full((), float("-inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    mean, before, before_total, before_mean, beyond, beyond_total, beyond_mean = (
        total,
        top,
        total,
        total,
        top,
        total,
        total,
    )
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = _load(theta, teacher, ids, vocab_size)
        ratio, x = _ratio(s, t, both, centre), _exact(s, t, both, alpha)
        following = tl.maximum(top, tl.max(x, axis=0))
        e = tl.where(both, tl.exp((x - _finite(following)).to(tl.float32)), 0.0)
        keep = tl.exp(top - _finite(following))
        total, mean, top = total * keep + _total(e), mean * keep + _total(e * ratio), following
        base = s - largest
        before, before_total, before_mean = _log_sum_at(before, before_total, before_mean, base, ratio, both, -alpha)
        beyond, beyond_total, beyond_mean = _log_sum_at(
            beyond, beyond_total, beyond_mean, base, ratio, both, 2.0 - alpha
        )
    tl.store(out + 0, top)
    tl.store(out + 1, total)
    tl.store(out + 2, mean)
    tl.store(out + 3, before)
    tl.store(out + 4, before_total)
    tl.store(out + 5, beyond)
    tl.store(out + 6, beyond_total)
    tl.store(out + 7, alpha)  # the same from all


@triton.jit
def write(
    theta: tl.tensor,
    teacher: tl.tensor,
    theta_stride: tl.tensor,
    teacher_stride: tl.tensor,
    facts: tl.tensor,
    states: tl.tensor,
    weighed: tl.tensor,
    logits: tl.tensor,
    numbers: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.constexpr,
    splits: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    theta += row * theta_stride
    teacher += row * teacher_stride
    logits += row * logits_stride
    facts += row * 16
    weighed += row * splits * 16
    alpha = tl.load(weighed + 7)
    top, scales = _scales(_column(weighed, 0, splits, width, float("-inf")))
    total = tl.sum(scales * _column(weighed, 1, splits, width, 0.0), axis=0)
    log_sum = top + tl.log(total)
    is_theta, is_teacher = alpha == 0, alpha == 1
    is_end = is_theta | is_teacher
    is_disjoint = (tl.load(facts + DISJOINT) != 0) & (is_end == 0)
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = _load(theta, teacher, ids, vocab_size)
        made = (_exact(s, t, both, alpha) - log_sum).to(tl.float32)
        made = tl.where(is_teacher | is_disjoint, t, tl.where(is_theta, s, made))
        tl.store(logits + ids, made, mask=ids < vocab_size)
    if part == 0:
        rest, centre, largest = tl.load(facts + REST), tl.load(facts + CENTRE), tl.load(facts + LARGEST)
        log_sum_theta = tl.load(facts + LOG_SUM_THETA)
        theta_alone, teacher_alone = tl.load(facts + THETA_ALONE) != 0, tl.load(facts + TEACHER_ALONE) != 0
        mean = tl.sum(scales * _column(weighed, 2, splits, width, 0.0), axis=0) / total - rest
        # log Σ of (1 − α) s + α t, less both normalisers in their shares
        log_z = log_sum - largest - alpha * centre - log_sum_theta - alpha * rest
        log_z = tl.where(is_end, 0.0, tl.where(is_disjoint, float("-inf"), tl.minimum(log_z, 0.0)))
        kl_theta = tl.where(is_theta, 0.0, tl.maximum(alpha * mean - log_z, 0.0))
        kl_teacher = tl.where(is_teacher, 0.0, tl.maximum((alpha - 1.0) * mean - log_z, 0.0))
        kl_theta = tl.where(is_teacher & teacher_alone | is_disjoint, float("inf"), kl_theta)
        kl_teacher = tl.where(is_theta & theta_alone | is_disjoint, float("inf"), kl_teacher)
        before, scales = _scales(_column(weighed, 3, splits, width, float("-inf")))
        before += (
            tl.log(tl.sum(scales * _column(weighed, 4, splits, width, 0.0), axis=0)) - log_sum_theta + alpha * rest
        )
        beyond, scales = _scales(_column(weighed, 5, splits, width, float("-inf")))
        beyond += tl.log(tl.sum(scales * _column(weighed, 6, splits, width, 0.0), axis=0)) - log_sum_theta
        beyond -= (2.0 - alpha) * rest
        ess_theta, ess_teacher = tl.exp(tl.minimum(-log_z - before, 0.0)), tl.exp(tl.minimum(-log_z - beyond, 0.0))
        ess_theta = tl.where(is_theta, 1.0, tl.where(theta_alone | is_disjoint, 0.0, ess_theta))
        ess_teacher = tl.where(is_teacher, 1.0, tl.where(teacher_alone | is_disjoint, 0.0, ess_teacher))
        is_sound = tl.load(facts + SOUND)
        out = numbers + row * 11
        tl.store(out + 0, alpha)
        tl.store(out + 1, log_z)
        tl.store(out + 2, kl_theta)
        tl.store(out + 3, kl_teacher)
        tl.store(out + 4, ess_theta)
        tl.store(out + 5, ess_teacher)
        tl.store(out + 6, tl.load(states + row * 16 + CLAMPED))
        tl.store(out + 7, is_disjoint.to(tl.float64) * is_sound)
        tl.store(out + 8, is_sound)
        tl.store(out + 9, largest + log_sum_theta)
        tl.store(out + 10, tl.load(facts + NORMALISER_TEACHER))
