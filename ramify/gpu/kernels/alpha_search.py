"""Newton's search for the teacher's weight α, a row over several programs; the truth is `sampling/alpha.py`.

settle    the facts of a row, and where its search starts
seek      takes the step that the sums of the previous launch call for, then sums at the new α: moments, or for
          ess_balance the log-sums at −α and at 2 − α
bound     takes the last of these steps, then keeps α within what the caller allows
refine    moments once more, from exponents in float64; `corrected` takes the step that they call for
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.pair_sums import (
    LOG_SUM,
    MEAN,
    NUM_SUMS,
    add_up,
    exact_exponents,
    exponents,
    extend_log_sum,
    extend_moments,
    load,
    log_ratio,
    merge,
    merge_moments,
    store_log_sum,
    store_moments,
)
from ramify.gpu.kernels.pair_survey import CENTRE, LARGEST, LOG_SUM_THETA, NUM_FACTS, REST, SPAN, sum_up
from ramify.sampling import alpha as truth

IDENTICAL = tl.constexpr(truth.IDENTICAL)
SLACK = tl.constexpr(truth.SLACK)
EDGE = tl.constexpr(truth.EDGE)
ROUNDING = tl.constexpr(truth.ROUNDING)
NOISY_SPAN = tl.constexpr(truth.NOISY_SPAN)
MOST_NOISE = tl.constexpr(truth.MOST_NOISE)
LEAST_FALL = tl.constexpr(truth.LEAST_FALL)
NEAR = tl.constexpr(truth.NEAR)
SETTLED = tl.constexpr(truth.SETTLED)
LEAST_GROWTH = tl.constexpr(truth.LEAST_GROWTH)

# The columns of a row's state, where its search stands: α, both ends of the bracket with log Z and its slope there, and
# what is decided.
NUM_STATES = tl.constexpr(16)
ALPHA = tl.constexpr(0)
LOW, LOW_VALUE, LOW_SLOPE = map(tl.constexpr, (1, 2, 3))
HIGH, HIGH_VALUE, HIGH_SLOPE = map(tl.constexpr, (4, 5, 6))
ARRIVED = tl.constexpr(7)
SOUGHT = tl.constexpr(8)
CLAMPED = tl.constexpr(9)

# The columns of a split's sums for ess_balance: log-sums at −α and at 2 − α.
BEFORE = tl.constexpr(0)
BEYOND = tl.constexpr(BEFORE + LOG_SUM)


@triton.jit
def _crossing(low: tl.tensor, low_value, low_slope, high, high_value, high_slope):  # type: ignore[no-untyped-def]
    """Where two tangents meet; halfway if rounding puts that outside."""
    crossing = ((low_value - low_slope * low) - (high_value - high_slope * high)) / (high_slope - low_slope)
    return tl.where((crossing > low) & (crossing < high), crossing, (low + high) / 2)


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
    tl.store(out + LOW_VALUE, low_value)
    tl.store(out + LOW_SLOPE, low_slope)
    tl.store(out + HIGH, high)
    tl.store(out + HIGH_VALUE, high_value)
    tl.store(out + HIGH_SLOPE, high_slope)
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
    value_low, slope_low, value_high, slope_high, span, differ, disjoint = sum_up(
        surveyed + row * splits * NUM_SUMS, grown + row * splits, facts + row * NUM_FACTS, splits, width
    )
    one = tl.full((), 1.0, tl.float64)
    is_half = (span <= IDENTICAL) | disjoint
    if has_given:
        alpha, arrived = tl.load(given + row), one > 0
    elif is_balance:
        alpha, arrived = one / 2, is_half
    else:
        alpha, arrived = _start(value_low, slope_low, value_high, slope_high, is_half, differ)
    arrived = arrived.to(tl.float64)
    _keep(
        states + row * NUM_STATES,
        alpha,
        one - 1,
        value_low,
        slope_low,
        one,
        value_high,
        slope_high,
        arrived,
        1 - arrived,
    )


@triton.jit
def _correction(mean: tl.tensor, square: tl.tensor, rise: tl.tensor, rise_square: tl.tensor) -> tl.tensor:
    """See `sampling.alpha.correction`."""
    fall, fall_square = rise - mean, square - rise_square
    fall = tl.where(fall > rise * LEAST_FALL, fall, float("nan"))
    return -(tl.log(rise) - tl.log(fall)) / (rise_square / rise + fall_square / fall)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    facts, state, sums, is_balance: tl.constexpr, splits: tl.constexpr, width: tl.constexpr
):
    """The state that follows the one at which these sums were taken; the same one if it had arrived."""
    alpha, arrived = tl.load(state + ALPHA), tl.load(state + ARRIVED)
    low, low_value, low_slope = tl.load(state + LOW), tl.load(state + LOW_VALUE), tl.load(state + LOW_SLOPE)
    high, high_value, high_slope = tl.load(state + HIGH), tl.load(state + HIGH_VALUE), tl.load(state + HIGH_SLOPE)
    if arrived == 0:
        rest, span = tl.load(facts + REST), tl.load(facts + SPAN)
        if is_balance:
            before, total, scales = merge(sums, BEFORE, splits, width)
            mean_before = add_up(sums, BEFORE + MEAN, scales, splits, width) / total
            before = before + tl.log(total)
            beyond, total, scales = merge(sums, BEYOND, splits, width)
            mean_beyond = add_up(sums, BEYOND + MEAN, scales, splits, width) / total
            beyond = beyond + tl.log(total)
            excess = before - beyond + 2.0 * rest
            low, high = tl.where(excess < 0, alpha, low), tl.where(excess < 0, high, alpha)
            step = alpha - excess / tl.maximum(mean_beyond - mean_before, LEAST_GROWTH)
            inside = (step >= low) & (step <= high)
            following = tl.where(inside, step, (low + high) / 2).to(tl.float32).to(tl.float64)
            arrived = (tl.abs(following - alpha) <= SETTLED).to(tl.float64)
            alpha = following
        else:
            log_sum, mean, square, rise, rise_square = merge_moments(sums, rest, splits, width)
            value = log_sum - tl.load(facts + LOG_SUM_THETA) - alpha * rest
            is_low = mean < 0
            low, high = tl.where(is_low, alpha, low), tl.where(is_low, high, alpha)
            low_value, high_value = tl.where(is_low, value, low_value), tl.where(is_low, high_value, value)
            low_slope, high_slope = tl.where(is_low, mean, low_slope), tl.where(is_low, high_slope, mean)
            step = alpha + _correction(mean, square, rise, rise_square)
            inside = (step >= low) & (step <= high)
            crossing = _crossing(low, low_value, low_slope, high, high_value, high_slope)
            following = tl.where(inside, step, crossing).to(tl.float32).to(tl.float64)
            is_root = tl.abs(mean) <= span * ROUNDING * tl.minimum(1.0 + span / NOISY_SPAN, MOST_NOISE)
            is_near = inside & (mean * mean <= tl.maximum(square - mean * mean, 0.0) * NEAR)
            alpha = tl.where(is_root & (is_near == 0), alpha, following)
            arrived = (is_root | is_near).to(tl.float64)
    return alpha, low, low_value, low_slope, high, high_value, high_slope, arrived


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
    facts += row * NUM_FACTS
    states += row * NUM_STATES
    if is_first:
        alpha, arrived = tl.load(states + ALPHA), tl.load(states + ARRIVED)
    else:
        alpha, low, low_value, low_slope, high, high_value, high_slope, arrived = _advance(
            facts, states, sums + row * splits * NUM_SUMS, is_balance, splits, width
        )
        if part == 0:
            sought = tl.load(states + SOUGHT)
            _keep(
                new_states + row * NUM_STATES,
                alpha,
                low,
                low_value,
                low_slope,
                high,
                high_value,
                high_slope,
                arrived,
                sought,
            )
    if arrived == 0:
        centre, largest = tl.load(facts + CENTRE), tl.load(facts + LARGEST).to(tl.float32)
        out = new_sums + (row * splits + part) * NUM_SUMS
        top = tl.full((), float("-inf"), tl.float64)
        total = tl.full((), 0.0, tl.float64)
        mean, square, rise, rise_square = total, total, total, total
        beyond, beyond_total, beyond_mean = top, total, total
        for start in range(0, split, block):
            ids = part * split + start + tl.arange(0, block)
            s, t, both = load(theta, teacher, ids, vocab_size)
            ratio, base = log_ratio(s, t, both, centre), s - largest
            if is_balance:
                x = exponents(base, ratio, both, -alpha)
                top, total, mean = extend_log_sum(top, total, mean, x, ratio, both)
                x = exponents(base, ratio, both, 2.0 - alpha)
                beyond, beyond_total, beyond_mean = extend_log_sum(beyond, beyond_total, beyond_mean, x, ratio, both)
            else:
                x = exponents(base, ratio, both, alpha)
                top, total, mean, square, rise, rise_square = extend_moments(
                    top, total, mean, square, rise, rise_square, x, ratio, both
                )
        if is_balance:
            store_log_sum(out + BEFORE, top, total, mean)
            store_log_sum(out + BEYOND, beyond, beyond_total, beyond_mean)
        else:
            store_moments(out, top, total, mean, square, rise, rise_square)


@triton.jit
def _within(alpha: tl.tensor, alpha_min: tl.constexpr, alpha_max: tl.constexpr) -> tl.tensor:
    # tl.maximum would round a bare number to float32.
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
    """The search's last step, then α's bounds and rows forced to the teacher; SOUGHT now says: may be refined."""
    row = tl.program_id(0).to(tl.int64)
    facts += row * NUM_FACTS
    states += row * NUM_STATES
    bounded += row * NUM_STATES
    alpha = tl.load(states + ALPHA)
    if is_sought:
        alpha, _, _, _, _, _, _, _ = _advance(facts, states, sums + row * splits * NUM_SUMS, is_balance, splits, width)
    is_forced = tl.load(forced + row) != 0
    inside = _within(alpha, alpha_min, alpha_max)
    clamped = (inside != alpha) & (is_forced == 0)
    tl.store(bounded + ALPHA, tl.where(is_forced, 1.0, inside))
    tl.store(bounded + CLAMPED, clamped.to(tl.float64))
    tl.store(bounded + SOUGHT, tl.where(is_forced | clamped, 0.0, tl.load(states + SOUGHT)))


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
    alpha, centre = tl.load(states + row * NUM_STATES + ALPHA), tl.load(facts + row * NUM_FACTS + CENTRE)
    top = tl.full((), float("-inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    mean, square, rise, rise_square = total, total, total, total
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = load(theta, teacher, ids, vocab_size)
        x = exact_exponents(s, t, both, alpha)
        top, total, mean, square, rise, rise_square = extend_moments(
            top, total, mean, square, rise, rise_square, x, log_ratio(s, t, both, centre), both
        )
    store_moments(refined + (row * splits + part) * NUM_SUMS, top, total, mean, square, rise, rise_square)


@triton.jit
def corrected(  # type: ignore[no-untyped-def]
    alpha, refined, rest, alpha_min: tl.constexpr, alpha_max: tl.constexpr, splits: tl.constexpr, width: tl.constexpr
):
    _, mean, square, rise, rise_square = merge_moments(refined, rest, splits, width)
    step = _correction(mean, square, rise, rise_square)
    step = tl.where(tl.abs(step) >= 0, tl.minimum(tl.maximum(step, -SLACK), SLACK), 0.0)  # NaN: stay
    return _within(alpha + step, alpha_min, alpha_max)
