"""The mixture at its final α: log q* and the numbers told of a row; the truth is `sampling/mixture.py`.

`weigh` sums at α, and for both effective sample sizes at −α and 2 − α; `write` reads the logits once more, knowing the
sums of the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.kernels.alpha_search import ALPHA, CLAMPED, SOUGHT, corrected
from ramify.kernels.pair_sums import (
    add_up,
    exact_exponents,
    exponents,
    extend_log_sum,
    load,
    log_ratio,
    merge,
    store_log_sum,
)
from ramify.kernels.pair_survey import (
    CENTRE,
    DISJOINT,
    LARGEST,
    LOG_SUM_THETA,
    NORMALISER_TEACHER,
    REST,
    SOUND,
    TEACHER_ALONE,
    THETA_ALONE,
)

# What a split leaves, after its log-sum at α: largest and Σ e at −α and at 2 − α, and α itself, the same from all.
BEFORE = tl.constexpr(3)
BEYOND = tl.constexpr(5)
FINAL_ALPHA = tl.constexpr(7)
# What is told of a row in the end.
NUM_NUMBERS = 11


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
        rest = tl.load(facts + REST)
        alpha = corrected(alpha, refined + row * splits * 16, rest, alpha_min, alpha_max, splits, width)
    largest = tl.load(facts + LARGEST).to(tl.float32)
    top = tl.full((), float("-inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    mean, before, before_total, before_mean = total, top, total, total
    beyond, beyond_total, beyond_mean = top, total, total
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = load(theta, teacher, ids, vocab_size)
        ratio, base = log_ratio(s, t, both, centre), s - largest
        x = exact_exponents(s, t, both, alpha)
        top, total, mean = extend_log_sum(top, total, mean, x, ratio, both)
        x = exponents(base, ratio, both, -alpha)
        before, before_total, before_mean = extend_log_sum(before, before_total, before_mean, x, ratio, both)
        x = exponents(base, ratio, both, 2.0 - alpha)
        beyond, beyond_total, beyond_mean = extend_log_sum(beyond, beyond_total, beyond_mean, x, ratio, both)
    out = weighed + (row * splits + part) * 16
    store_log_sum(out, top, total, mean)
    tl.store(out + BEFORE, before)
    tl.store(out + BEFORE + 1, before_total)
    tl.store(out + BEYOND, beyond)
    tl.store(out + BEYOND + 1, beyond_total)
    tl.store(out + FINAL_ALPHA, alpha)


@triton.jit
def _tell(  # type: ignore[no-untyped-def]
    facts, state, weighed, out, alpha, log_sum, mean, is_disjoint, splits: tl.constexpr, width: tl.constexpr
):
    """Writes a row's numbers; log_sum and mean are of the mixture, as its sums give them."""
    is_theta, is_teacher = alpha == 0, alpha == 1
    rest, centre, largest = tl.load(facts + REST), tl.load(facts + CENTRE), tl.load(facts + LARGEST)
    log_sum_theta = tl.load(facts + LOG_SUM_THETA)
    theta_alone, teacher_alone = tl.load(facts + THETA_ALONE) != 0, tl.load(facts + TEACHER_ALONE) != 0
    mean -= rest
    # log Σ of (1 − α) s + α t, less both normalisers in their shares
    log_z = log_sum - largest - alpha * centre - log_sum_theta - alpha * rest
    log_z = tl.where(is_theta | is_teacher, 0.0, tl.where(is_disjoint, float("-inf"), tl.minimum(log_z, 0.0)))
    kl_theta = tl.where(is_theta, 0.0, tl.maximum(alpha * mean - log_z, 0.0))
    kl_teacher = tl.where(is_teacher, 0.0, tl.maximum((alpha - 1.0) * mean - log_z, 0.0))
    kl_theta = tl.where(is_teacher & teacher_alone | is_disjoint, float("inf"), kl_theta)
    kl_teacher = tl.where(is_theta & theta_alone | is_disjoint, float("inf"), kl_teacher)
    before, total, _ = merge(weighed, BEFORE, splits, width)
    before += tl.log(total) - log_sum_theta + alpha * rest
    beyond, total, _ = merge(weighed, BEYOND, splits, width)
    beyond += tl.log(total) - log_sum_theta
    beyond -= (2.0 - alpha) * rest
    ess_theta, ess_teacher = tl.exp(tl.minimum(-log_z - before, 0.0)), tl.exp(tl.minimum(-log_z - beyond, 0.0))
    ess_theta = tl.where(is_theta, 1.0, tl.where(theta_alone | is_disjoint, 0.0, ess_theta))
    ess_teacher = tl.where(is_teacher, 1.0, tl.where(teacher_alone | is_disjoint, 0.0, ess_teacher))
    is_sound = tl.load(facts + SOUND)
    tl.store(out + 0, alpha)
    tl.store(out + 1, log_z)
    tl.store(out + 2, kl_theta)
    tl.store(out + 3, kl_teacher)
    tl.store(out + 4, ess_theta)
    tl.store(out + 5, ess_teacher)
    tl.store(out + 6, tl.load(state + CLAMPED))
    tl.store(out + 7, is_disjoint.to(tl.float64) * is_sound)
    tl.store(out + 8, is_sound)
    tl.store(out + 9, largest + log_sum_theta)
    tl.store(out + 10, tl.load(facts + NORMALISER_TEACHER))


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
    alpha = tl.load(weighed + FINAL_ALPHA)
    top, total, scales = merge(weighed, 0, splits, width)
    log_sum = top + tl.log(total)
    is_theta, is_teacher = alpha == 0, alpha == 1
    is_disjoint = (tl.load(facts + DISJOINT) != 0) & ((is_theta | is_teacher) == 0)
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = load(theta, teacher, ids, vocab_size)
        made = (exact_exponents(s, t, both, alpha) - log_sum).to(tl.float32)
        made = tl.where(is_teacher | is_disjoint, t, tl.where(is_theta, s, made))
        tl.store(logits + ids, made, mask=ids < vocab_size)
    if part == 0:
        mean = add_up(weighed, 2, scales, splits, width) / total
        _tell(facts, states + row * 16, weighed, numbers + row * 11, alpha, log_sum, mean, is_disjoint, splits, width)
