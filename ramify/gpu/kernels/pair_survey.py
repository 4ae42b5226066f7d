"""What two models' logits are before they are mixed: the facts of a row, as `sampling/pair.py` has them.

`survey` reads both rows once, `grow` once more where the models nearly agree; `sum_up`, with which the search begins,
turns what they leave into facts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.pair_sums import (
    LOG_SUM,
    MEAN,
    NUM_SUMS,
    SUM,
    TOP,
    TOTAL,
    add_up,
    column,
    exponentials,
    extend_log_sum,
    load,
    log_add,
    log_ratio,
    merge,
    store_log_sum,
    sum_of,
)
from ramify.sampling import pair as truth

SMALL = tl.constexpr(truth.SMALL)

# The columns that a split's survey leaves.
SHARED_THETA = tl.constexpr(0)  # log-sums of what both allow, under each model; d is teacher − theta, as it is
SHARED_TEACHER = tl.constexpr(SHARED_THETA + LOG_SUM)
THETA_ONLY = tl.constexpr(SHARED_TEACHER + LOG_SUM)  # sums of what one allows and the other does not
TEACHER_ONLY = tl.constexpr(THETA_ONLY + SUM)
LOWEST = tl.constexpr(TEACHER_ONLY + SUM)  # of teacher − theta
HIGHEST = tl.constexpr(LOWEST + 1)
FAULTS = tl.constexpr(HIGHEST + 1)

# The columns of a row's facts, which hold at any α.
NUM_FACTS = tl.constexpr(16)
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
    top_s = tl.full((), float("-inf"), tl.float64)
    top_t, alone_s, alone_t, highest = top_s, top_s, top_s, top_s
    sum_s = tl.full((), 0.0, tl.float64)
    mean_s, sum_t, mean_t, alone_sum_s, alone_sum_t, faults = sum_s, sum_s, sum_s, sum_s, sum_s, sum_s
    lowest = tl.full((), float("inf"), tl.float64)
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = load(theta, teacher, ids, vocab_size)
        d = tl.where(both, t - s, 0.0)
        lowest = tl.minimum(lowest, tl.min(tl.where(both, d, float("inf")), axis=0).to(tl.float64))
        highest = tl.maximum(highest, tl.max(tl.where(both, d, float("-inf")), axis=0).to(tl.float64))
        # What is not below infinity is infinite or NaN.
        faults += sum_of(((s < float("inf")) & (t < float("inf")) == 0).to(tl.float32))

        top_s, sum_s, mean_s = extend_log_sum(top_s, sum_s, mean_s, tl.where(both, s, float("-inf")), d, both)
        top_t, sum_t, mean_t = extend_log_sum(top_t, sum_t, mean_t, tl.where(both, t, float("-inf")), d, both)

        only = (s > float("-inf")) & (t == float("-inf"))
        alone_s, e, keep = exponentials(alone_s, tl.where(only, s, float("-inf")), only)
        alone_sum_s = alone_sum_s * keep + sum_of(e)

        only = (t > float("-inf")) & (s == float("-inf"))
        alone_t, e, keep = exponentials(alone_t, tl.where(only, t, float("-inf")), only)
        alone_sum_t = alone_sum_t * keep + sum_of(e)
    out = surveyed + (row * splits + part) * NUM_SUMS
    store_log_sum(out + SHARED_THETA, top_s, sum_s, mean_s)
    store_log_sum(out + SHARED_TEACHER, top_t, sum_t, mean_t)
    tl.store(out + THETA_ONLY + TOP, alone_s)
    tl.store(out + THETA_ONLY + TOTAL, alone_sum_s)
    tl.store(out + TEACHER_ONLY + TOP, alone_t)
    tl.store(out + TEACHER_ONLY + TOTAL, alone_sum_t)
    tl.store(out + LOWEST, lowest)
    tl.store(out + HIGHEST, highest)
    tl.store(out + FAULTS, faults)


@triton.jit
def _highest(surveyed, index: tl.constexpr, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max(column(surveyed, index, splits, width, float("-inf")), axis=0)


@triton.jit
def _is_small(surveyed: tl.tensor, centre: tl.tensor, splits: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """Whether the difference of the normalisers is summed as one: no d is large, and both allow the same tokens."""
    highest = _highest(surveyed, HIGHEST, splits, width)
    alone = tl.maximum(
        _highest(surveyed, THETA_ONLY + TOP, splits, width),
        _highest(surveyed, TEACHER_ONLY + TOP, splits, width),
    )
    return (highest - centre < SMALL) & (alone == float("-inf"))


@triton.jit
def _expm1(x: tl.tensor) -> tl.tensor:
    """e^x − 1: near 0 by the first eight terms of its series, where the difference would lose its digits."""
    near = x / 8
    for degree in tl.static_range(7, 1, -1):
        near = (1.0 + near) * x / degree
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
    surveyed += row * splits * NUM_SUMS
    top, total, scales = merge(surveyed, SHARED_THETA, splits, width)
    mean = add_up(surveyed, SHARED_THETA + MEAN, scales, splits, width)
    centre = (mean / total).to(tl.float32).to(tl.float64)
    growth = tl.full((), 0.0, tl.float64)
    if _is_small(surveyed, centre, splits, width):
        for start in range(0, split, block):
            ids = part * split + start + tl.arange(0, block)
            s, t, both = load(theta, teacher, ids, vocab_size)
            ratio = tl.minimum(log_ratio(s, t, both, centre), SMALL)
            growth += sum_of(tl.where(both, tl.exp(s - top.to(tl.float32)) * _expm1(ratio), 0.0))
    tl.store(grown + row * splits + part, growth)


@triton.jit
def sum_up(surveyed, grown, facts, splits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a row's facts. Returns log Z and its slope at 0 and at 1, the largest |d|, whether either model allows
    what the other does not, and whether they have no token in common."""
    top_s, sum_s, scales = merge(surveyed, SHARED_THETA, splits, width)
    mean_s = add_up(surveyed, SHARED_THETA + MEAN, scales, splits, width)
    top_t, sum_t, scales = merge(surveyed, SHARED_TEACHER, splits, width)
    mean_t = add_up(surveyed, SHARED_TEACHER + MEAN, scales, splits, width)
    alone_s, alone_sum_s, _ = merge(surveyed, THETA_ONLY, splits, width)
    alone_t, alone_sum_t, _ = merge(surveyed, TEACHER_ONLY, splits, width)
    lowest = tl.min(column(surveyed, LOWEST, splits, width, float("inf")), axis=0)
    highest = _highest(surveyed, HIGHEST, splits, width)
    faults = tl.sum(column(surveyed, FAULTS, splits, width, 0.0), axis=0)

    largest = tl.maximum(top_s, alone_s)
    shared_s, shared_t = top_s + tl.log(sum_s), top_t + tl.log(sum_t)
    whole_s = tl.where(alone_sum_s > 0, log_add(shared_s, alone_s + tl.log(alone_sum_s)), shared_s)
    whole_t = tl.where(alone_sum_t > 0, log_add(shared_t, alone_t + tl.log(alone_sum_t)), shared_t)
    centre = (mean_s / sum_s).to(tl.float32).to(tl.float64)
    parts = tl.arange(0, width)
    growth = tl.sum(tl.load(grown + parts, mask=parts < splits, other=0.0), axis=0)
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

    slope_low, slope_high = mean_s / sum_s - centre - rest, mean_t / sum_t - centre - rest
    differ = (alone_sum_s > 0) | (alone_sum_t > 0)
    return shared_s - whole_s, slope_low, shared_t - whole_t, slope_high, span, differ, disjoint
