"""The mixture of two models: q* = π_θ^(1−α) π_t^α / Z over the whole vocabulary, α found anew for every row.

    logits of both, after controls → temperature (`scale`) → `mix`: support mask → α → log q*, and what is told of it

α is the teacher's weight. A support mask (the teacher's top-k and top-p) restricts both models, and both are
renormalised on it before α is found. A row whose α is exactly 0 or 1 takes that model's logits as they are, to the bit:
under a seed it draws what that model alone would draw. Rows at temperature 0 are mixed at temperature 1; their caller
takes the likeliest token.

This is the truth; kernels of our own do the same on a CPU (cpu/mixer.py) and on a GPU (gpu/mixer.py). Here the whole
batch goes at once on a GPU, with no look at the numbers: it can stand in a CUDA graph. On a CPU a few rows go at a
time, so that they stay in its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ramify.config import MixtureConfig
from ramify.sampling import alpha as methods
from ramify.sampling import filters
from ramify.sampling.pair import Pair, log_sum

ROWS_AT_ONCE = 4  # on a CPU: 49,152 float32 logits are 196 kB, and some eight arrays of them are at work


@dataclass(frozen=True, slots=True)
class Mixed:
    """The mixture of each row. Effective sample sizes are per sample drawn, between 0 and 1.

    They are those of samples drawn from q* and weighted by w = π/q* to stand for a model π: (Σ w)² / (n Σ w²), which
    tends to 1 / Σ π²/q*. kl_theta, kl_teacher: KL(q*‖π), in nats. All of these are of the distributions that were
    mixed, after temperature and support mask. Where a row is disjoint, log_z is minus infinity and the logits mean
    nothing.
    """

    logits: Tensor  # (R, V) float32: log q*, or the one model's own logits where α is 0 or 1
    alpha: Tensor  # (R,) float64, as are the others
    log_z: Tensor
    kl_theta: Tensor
    kl_teacher: Tensor
    ess_theta: Tensor
    ess_teacher: Tensor
    clamped: Tensor  # (R,) bool: alpha_min or alpha_max stopped α
    disjoint: Tensor  # (R,) bool: no token is possible under both models, or the one that decides: nothing to draw
    sound: Tensor  # (R,) bool: neither model gave NaN or plus infinity; elsewhere nothing here means anything
    normaliser_theta: Tensor  # (R,) log Σ exp of what was mixed: a token's logprob is its logit less this
    normaliser_teacher: Tensor

    @classmethod
    def of(cls, logits: Tensor, numbers: Tensor) -> Mixed:
        """From what kernels leave: numbers (R, len(NUMBERS)) float64, in their order, answers as 0 or 1."""
        told = dict(zip(NUMBERS, numbers.unbind(1), strict=True))
        return cls(logits, **{name: each > 0 if name in ANSWERS else each for name, each in told.items()})


NUMBERS = tuple(field.name for field in fields(Mixed) if field.name != "logits")  # what is told of a row, in order
ANSWERS = ("clamped", "disjoint", "sound")  # of these, the ones that are bool


def mix(
    teacher: Tensor,
    theta: Tensor,
    config: MixtureConfig,
    *,
    first: Tensor,
    special_token_ids: Tensor,
) -> Mixed:
    """Mixes logits teacher, theta (R, V) float32 that have their temperature already.

    first: (R,) bool, rows at their first token; special_token_ids (S,) int64.
    """
    if theta.device.type != "cpu" or theta.shape[0] <= ROWS_AT_ONCE:
        return _mix(teacher, theta, config, first, special_token_ids)
    parts = []
    logits = torch.empty_like(theta)
    for start in range(0, theta.shape[0], ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        part = _mix(teacher[some], theta[some], config, first[some], special_token_ids)
        logits[some] = part.logits
        parts.append(part)
    return Mixed(logits, **{name: torch.cat([getattr(part, name) for part in parts]) for name in NUMBERS})


def _mix(teacher: Tensor, theta: Tensor, config: MixtureConfig, first: Tensor, special_token_ids: Tensor) -> Mixed:
    forced = forced_rows(teacher, config, first, special_token_ids)
    teacher, theta = on_support(teacher, theta, config)
    pair = Pair.of(theta, teacher)
    alpha, clamped, may_move = _choose(pair, config, forced)
    exponents, lacking = pair.exponents(alpha)
    probabilities = exponents.softmax(-1)
    if config.alpha_method == "kl_symmetry":
        # The search's last step, from exponents that are exact where its own were rounded.
        step = methods.correction(pair.moments(probabilities)).clamp(-methods.SLACK, methods.SLACK)
        bounded = (alpha + step.nan_to_num(0)).clamp(config.alpha_min, config.alpha_max)
        change = torch.where(may_move, bounded - alpha, 0.0).float()
        alpha = alpha + change
        exponents = exponents.addcmul_(change[:, None], pair.ratio)
        probabilities = exponents.softmax(-1)
    whole = log_sum(exponents, probabilities)
    log_z = whole + lacking - pair.log_sum_theta - alpha * pair.rest
    mean = pair.mean(probabilities)
    return _describe(pair, exponents.sub_(whole.float()[:, None]), alpha, log_z, mean=mean, clamped=clamped)


def scale(logits: Tensor, temperatures: Tensor) -> Tensor:
    """By temperatures (R,), bit for bit as one model's rows are scaled: rows at 1, and at 0, keep their logits."""
    # Nothing subtracted and divided by 1 is the same to the bit, and saves a pass over the vocabulary.
    is_scaled = (temperatures != 0) & (temperatures != 1)
    tops = torch.where(is_scaled[:, None], logits.amax(-1, keepdim=True), 0.0)
    return (logits - tops).div_(torch.where(is_scaled, temperatures.clamp_min(1e-38), 1.0)[:, None])


def forced_rows(teacher: Tensor, config: MixtureConfig, first: Tensor, special_token_ids: Tensor) -> Tensor:
    """(R,) bool: rows where the teacher decides alone."""
    forced = torch.zeros_like(first)
    if config.force_teacher_first_token:
        forced = forced | first
    if config.force_teacher_special_tokens:
        forced = forced | (teacher.argmax(-1)[:, None] == special_token_ids).any(-1)
    return forced


def on_support(teacher: Tensor, theta: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Both (R, V), minus infinity where the teacher's top-k and top-p leave nothing."""
    floor = support_floor(teacher, config)
    if floor is None:
        return teacher, theta
    outside = teacher < floor
    return teacher.masked_fill(outside, -torch.inf), theta.masked_fill(outside, -torch.inf)


def support_floor(teacher: Tensor, config: MixtureConfig) -> Tensor | None:
    """(R, 1): the smallest of the teacher's logits (R, V) that stays; None: all. top-p acts on what top-k left."""
    rows, vocab_size = teacher.shape
    top_k = min(config.teacher_top_k, vocab_size) if config.teacher_top_k > 0 else vocab_size
    if top_k == vocab_size and config.teacher_top_p == 1:
        return None
    if config.teacher_top_p == 1:
        return teacher.topk(top_k, dim=-1).values[:, -1:]
    if teacher.device.type == "cpu":
        counts = torch.full((rows,), top_k) if top_k < vocab_size else None
        return filters.floors(teacher, filters.Filters(counts, torch.full((rows,), config.teacher_top_p), None))
    return sorted_floor(teacher, top_k, config.teacher_top_p)


def sorted_floor(teacher: Tensor, top_k: int, top_p: float) -> Tensor:
    """The same floor by sorting, which asks the device for no number."""
    ordered = teacher.sort(dim=-1, descending=True).values
    kth = ordered[:, top_k - 1 : top_k]
    kept = ordered.masked_fill(ordered < kth, -torch.inf)  # what ties with the k-th stays
    reached = kept.softmax(-1).cumsum(-1, dtype=torch.float64)
    crossing = (reached < top_p).sum(-1, keepdim=True)
    chosen = ordered.gather(1, crossing.clamp_max(ordered.shape[1] - 1))
    return torch.where(crossing < ordered.shape[1], torch.maximum(chosen, kth), kth)


def _choose(pair: Pair, config: MixtureConfig, forced: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """α (R,) within its bounds; whether a bound stopped it; and whether it is a search's answer that may be refined."""
    sought = forced
    if config.alpha_method == "kl_symmetry":
        found, sought = methods.kl_symmetry(pair)
    elif config.alpha_method == "ess_balance":
        found = methods.ess_balance(pair)
    elif config.alpha_method == "entropy":
        found = methods.entropy(pair.theta, pair.teacher)
    elif config.alpha_method == "kl_budget":
        assert config.kl_budget is not None, "checked by the configuration"
        found = methods.kl_budget(pair, config.kl_budget)
    else:
        assert config.alpha is not None, "checked by the configuration"
        found = torch.full_like(pair.rest, config.alpha)
    alpha = found.clamp(config.alpha_min, config.alpha_max)
    clamped = (alpha != found) & ~forced
    return torch.where(forced, 1.0, alpha), clamped, sought & ~clamped & ~forced


def _describe(pair: Pair, logits: Tensor, alpha: Tensor, log_z: Tensor, *, mean: Tensor, clamped: Tensor) -> Mixed:
    """What is said of q*; mean (R,) is that of d under it. Rows of one model alone, and of none, are put right here."""
    is_theta, is_teacher = alpha == 0, alpha == 1
    is_end = is_theta | is_teacher
    # Its support may leave a student that decides alone nothing; the teacher, whose support it is, keeps its likeliest.
    disjoint = pair.is_disjoint & ~is_end | is_theta & (pair.largest == -torch.inf)
    if alpha.device.type != "cpu" or bool((is_end | disjoint).any()):
        logits = torch.where(is_theta[:, None], pair.theta, logits)
        # A disjoint row ends with an error; until then whoever reads its logits must find numbers.
        logits = torch.where((is_teacher | disjoint)[:, None], pair.teacher, logits)
    log_z = log_z.clamp_max(0).masked_fill(is_end, 0).masked_fill(disjoint, -torch.inf)
    kl_theta = (alpha * mean - log_z).clamp_min(0).masked_fill(is_theta, 0)
    kl_teacher = ((alpha - 1) * mean - log_z).clamp_min(0).masked_fill(is_teacher, 0)
    # One model alone may draw what the other rules out; a mixture draws nothing that either rules out.
    kl_theta = kl_theta.masked_fill(is_teacher & pair.teacher_alone | disjoint, torch.inf)
    kl_teacher = kl_teacher.masked_fill(is_theta & pair.theta_alone | disjoint, torch.inf)
    # Σ π_θ²/q = Z(α) Z(−α), and Σ π_t²/q = Z(α) Z(2 − α)
    ess_theta = (-log_z - pair.at(-alpha)[1]).clamp_max(0).exp()
    ess_teacher = (-log_z - pair.at(2 - alpha)[1]).clamp_max(0).exp()
    ess_theta = ess_theta.masked_fill(pair.theta_alone | disjoint, 0).masked_fill(is_theta, 1)
    ess_teacher = ess_teacher.masked_fill(pair.teacher_alone | disjoint, 0).masked_fill(is_teacher, 1)
    return Mixed(
        logits,
        alpha,
        log_z,
        kl_theta,
        kl_teacher,
        ess_theta,
        ess_teacher,
        clamped,
        disjoint & pair.is_sound,
        pair.is_sound,
        *pair.normalisers,
    )
