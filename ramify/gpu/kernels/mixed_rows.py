"""The mixture at its final α: log q* and the numbers told of a row; the truth is `sampling/mixture.py`.

`weigh` sums at α, and for both effective sample sizes at −α and 2 − α; `write` reads the logits once more, knowing the
sums of the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.alpha_search import ALPHA, CLAMPED, NUM_STATES, SOUGHT, corrected
from ramify.gpu.kernels.pair_sums import (
    LOG_SUM,
    MEAN,
    NUM_SUMS,
    SUM,
    TOP,
    TOTAL,
    add_up,
    exact_exponents,
    exponents,
    extend_log_sum,
    load,
    log_ratio,
    merge,
    store_log_sum,
)
from ramify.gpu.kernels.pair_survey import (
    CENTRE,
    DISJOINT,
    LARGEST,
    LOG_SUM_THETA,
    NORMALISER_TEACHER,
    NUM_FACTS,
    REST,
    SOUND,
    TEACHER_ALONE,
    THETA_ALONE,
)
from ramify.sampling.mixture import NUMBERS

# The columns that a split leaves: a log-sum at α, sums at −α and at 2 − α, and α, the same from all.
AT_ALPHA = tl.constexpr(0)
BEFORE = tl.constexpr(AT_ALPHA + LOG_SUM)
BEYOND = tl.constexpr(BEFORE + SUM)
FINAL_ALPHA = tl.constexpr(BEYOND + SUM)

# The columns of what is told of a row in the end.
NUM_NUMBERS = tl.constexpr(len(NUMBERS))
TOLD_ALPHA = tl.constexpr(NUMBERS.index("alpha"))
TOLD_LOG_Z = tl.constexpr(NUMBERS.index("log_z"))
TOLD_KL_THETA = tl.constexpr(NUMBERS.index("kl_theta"))
TOLD_KL_TEACHER = tl.constexpr(NUMBERS.index("kl_teacher"))
TOLD_ESS_THETA = tl.constexpr(NUMBERS.index("ess_theta"))
TOLD_ESS_TEACHER = tl.constexpr(NUMBERS.index("ess_teacher"))
TOLD_CLAMPED = tl.constexpr(NUMBERS.index("clamped"))
TOLD_DISJOINT = tl.constexpr(NUMBERS.index("disjoint"))
TOLD_SOUND = tl.constexpr(NUMBERS.index("sound"))
TOLD_NORMALISER_THETA = tl.constexpr(NUMBERS.index("normaliser_theta"))
TOLD_NORMALISER_TEACHER = tl.constexpr(NUMBERS.index("normaliser_teacher"))


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
    facts += row * NUM_FACTS
    alpha, centre = tl.load(states + row * NUM_STATES + ALPHA), tl.load(facts + CENTRE)
    if refines and tl.load(states + row * NUM_STATES + SOUGHT) != 0:
        rest = tl.load(facts + REST)
        alpha = corrected(alpha, refined + row * splits * NUM_SUMS, rest, alpha_min, alpha_max, splits, width)
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
    out = weighed + (row * splits + part) * NUM_SUMS
    store_log_sum(out + AT_ALPHA, top, total, mean)
    tl.store(out + BEFORE + TOP, before)
    tl.store(out + BEFORE + TOTAL, before_total)
    tl.store(out + BEYOND + TOP, beyond)
    tl.store(out + BEYOND + TOTAL, beyond_total)
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
    log_z = tl.where(is_disjoint, float("-inf"), tl.where(is_theta | is_teacher, 0.0, tl.minimum(log_z, 0.0)))
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
    tl.store(out + TOLD_ALPHA, alpha)
    tl.store(out + TOLD_LOG_Z, log_z)
    tl.store(out + TOLD_KL_THETA, kl_theta)
    tl.store(out + TOLD_KL_TEACHER, kl_teacher)
    tl.store(out + TOLD_ESS_THETA, ess_theta)
    tl.store(out + TOLD_ESS_TEACHER, ess_teacher)
    tl.store(out + TOLD_CLAMPED, tl.load(state + CLAMPED))
    tl.store(out + TOLD_DISJOINT, is_disjoint.to(tl.float64) * is_sound)
    tl.store(out + TOLD_SOUND, is_sound)
    tl.store(out + TOLD_NORMALISER_THETA, largest + log_sum_theta)
    tl.store(out + TOLD_NORMALISER_TEACHER, tl.load(facts + NORMALISER_TEACHER))


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
    facts += row * NUM_FACTS
    weighed += row * splits * NUM_SUMS
    alpha = tl.load(weighed + FINAL_ALPHA)
    top, total, scales = merge(weighed, AT_ALPHA, splits, width)
    log_sum = top + tl.log(total)
    is_theta, is_teacher = alpha == 0, alpha == 1
    is_disjoint = (tl.load(facts + DISJOINT) != 0) & ((is_theta | is_teacher) == 0)
    # Its support may leave a student that decides alone nothing.
    is_disjoint |= is_theta & (tl.load(facts + LARGEST) == float("-inf"))
    for start in range(0, split, block):
        ids = part * split + start + tl.arange(0, block)
        s, t, both = load(theta, teacher, ids, vocab_size)
        made = (exact_exponents(s, t, both, alpha) - log_sum).to(tl.float32)
        made = tl.where(is_teacher | is_disjoint, t, tl.where(is_theta, s, made))
        tl.store(logits + ids, made, mask=ids < vocab_size)
    if part == 0:
        mean = add_up(weighed, AT_ALPHA + MEAN, scales, splits, width) / total
        _tell(
            facts,
            states + row * NUM_STATES,
            weighed,
            numbers + row * NUM_NUMBERS,
            alpha,
            log_sum,
            mean,
            is_disjoint,
            splits,
            width,
        )
