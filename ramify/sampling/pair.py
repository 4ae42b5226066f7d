"""Two models' distributions in one context, in the form in which their mixtures are cheap and exact to evaluate.

    d            = log π_t − log π_θ                     the log-ratio, one number a token
    log Z(β)     = log Σ π_θ^(1−β) π_t^β = log Σ π_θ e^(β d)
    d/dβ log Z   = mean of d under q_β,    d²/dβ² log Z = its variance

Everything the mixture needs is log Z and these two at a few β: α between 0 and 1 for the mixture itself, −α and 2 − α
for effective sample sizes. Logits are float32, and d may be some hundreds where the models disagree, so a few things
are done with care: numbers of a row (R,) are float64; d is kept less a constant near its mean (`centre`), so that
models that nearly agree keep their digits; and where the mixture's own logits are formed, the two large terms that
cancel are added in float64.

Nothing here asks the device for a number: shapes and the order of operations depend on shapes alone. On a CPU, where
looking costs nothing, work that no row needs is left out; what is left out never changes another row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 8.0  # while no d is larger, the difference of the normalisers is summed as one


@dataclass(frozen=True, slots=True)
class Moments:
    """At some β of each row, (R,) float64 each."""

    log_sum: Tensor  # log Σ exp of the exponents that were given
    mean: Tensor  # of `ratio` under q_β
    variance: Tensor


@dataclass(frozen=True, slots=True)
class Pair:
    """R rows over V tokens. Tokens that either model rules out (minus infinity) have no part in any mixture."""

    theta: Tensor  # (R, V) float32 logits
    teacher: Tensor  # (R, V)
    base: Tensor  # (R, V) theta less its row's largest; minus infinity where either model rules the token out
    ratio: Tensor  # (R, V) d less `centre` and `rest`; 0 where either model rules the token out
    largest: Tensor  # (R,) of theta
    largest_teacher: Tensor  # (R,)
    centre: Tensor  # (R,) what was taken from teacher − theta
    rest: Tensor  # (R,) what must still be taken from it: d = ratio − rest
    log_sum_theta: Tensor  # (R,) log Σ exp(theta − largest), over all that theta allows
    slopes: tuple[Tensor, Tensor]  # (R,) each: d/dβ log Z at 0 and at 1
    span: Tensor  # (R,) the largest |d|
    ruled_out: Tensor | None  # (R, V) bool; None where it is known that no token is
    theta_alone: Tensor  # (R,) bool: theta allows something that the teacher does not
    teacher_alone: Tensor  # (R,) bool
    is_disjoint: Tensor  # (R,) bool: no token is allowed by both

    @classmethod
    def of(cls, theta: Tensor, teacher: Tensor) -> Pair:
        largest, largest_teacher = theta.amax(-1), teacher.amax(-1)
        base = theta - largest[:, None]
        ratio = teacher - theta
        lowest, highest = ratio.amin(-1), ratio.amax(-1)
        ruled_out = None
        shared_teacher = teacher
        theta_alone = teacher_alone = is_disjoint = torch.zeros_like(largest, dtype=torch.bool)
        if theta.device.type != "cpu" or not bool((lowest.isfinite() & highest.isfinite()).all()):
            without_theta, without_teacher = theta == -torch.inf, teacher == -torch.inf
            ruled_out = without_theta | without_teacher
            theta_alone = (without_teacher & ~without_theta).any(-1)
            teacher_alone = (without_theta & ~without_teacher).any(-1)
            is_disjoint = ruled_out.all(-1)
            base = base.masked_fill(ruled_out, -torch.inf)
            lowest = ratio.masked_fill(ruled_out, torch.inf).amin(-1)
            highest = ratio.masked_fill_(ruled_out, -torch.inf).amax(-1)
            ratio = ratio.masked_fill_(ruled_out, 0.0)
            shared_teacher = teacher.masked_fill(ruled_out, -torch.inf)

        at_theta = base.softmax(-1)
        centre = (at_theta * ratio).sum(-1)  # any number near the mean will do
        ratio = ratio.sub_(centre[:, None])
        if ruled_out is not None:
            ratio = ratio.masked_fill_(ruled_out, 0.0)
        mean_theta = (at_theta * ratio).sum(-1).double()
        at_teacher = shared_teacher.softmax(-1)
        mean_teacher = (at_teacher * ratio).sum(-1).double()
        # The likeliest token's probability is one over the sum of exponentials.
        log_sum_theta, log_sum_teacher = (-item.amax(-1).double().log() for item in (at_theta, at_teacher))
        if ruled_out is not None:
            log_sum_theta = torch.where(theta_alone, _log_sum(theta, largest), log_sum_theta)
            log_sum_teacher = torch.where(teacher_alone, _log_sum(teacher, largest_teacher), log_sum_teacher)
        lowest, highest = lowest.double() - centre, highest.double() - centre
        rest = (largest_teacher.double() - largest) + (log_sum_teacher - log_sum_theta) - centre
        is_small = (highest < SMALL) & ~(theta_alone | teacher_alone)
        if theta.device.type != "cpu" or bool(is_small.any()):
            # log E_θ[e^ratio], not two sums taken from each other: keeps α's digits where the models nearly agree.
            grown = (at_theta * ratio.clamp_max(SMALL).expm1_()).sum(-1).double()
            rest = torch.where(is_small, grown.log1p(), rest)
        return cls(
            theta,
            teacher,
            base,
            ratio,
            largest,
            largest_teacher,
            centre,
            rest,
            log_sum_theta,
            (mean_theta - rest, mean_teacher - rest),
            torch.maximum(rest - lowest, highest - rest),
            ruled_out,
            theta_alone,
            teacher_alone,
            is_disjoint,
        )

    @property
    def normalisers(self) -> tuple[Tensor, Tensor]:
        """log Σ exp of theta and of teacher, (R,) float64 each."""
        theta = self.largest + self.log_sum_theta
        return theta, theta + self.centre + self.rest

    @property
    def is_sound(self) -> Tensor:
        """(R,) bool: neither model gave NaN or plus infinity."""
        return (self.largest < torch.inf) & (self.largest_teacher < torch.inf)

    def at(self, beta: Tensor) -> Moments:
        """Moments at beta (R,) float32, of base + beta · ratio."""
        return self.moments(torch.addcmul(self.base, beta[:, None], self.ratio))

    def moments(self, exponents: Tensor) -> Moments:
        """Of exponents (R, V): the mean and variance of `ratio` under their softmax."""
        probabilities = exponents.softmax(-1)
        # As above: the largest probability is exp(largest exponent − log-sum-exp).
        log_sum = exponents.amax(-1).double() - probabilities.amax(-1).double().log()
        weighted = probabilities.mul_(self.ratio)
        mean = weighted.sum(-1).double()
        variance = weighted.mul_(self.ratio).sum(-1).double() - mean.square()
        return Moments(log_sum, mean, variance.clamp_min(0))

    def log_z(self, beta: Tensor) -> Tensor:
        """log Z (R,) float64 at beta (R,) of any value, over the tokens that both models allow."""
        exponents = torch.addcmul(self.base, beta.float()[:, None], self.ratio)
        log_sum = exponents.amax(-1).double() - exponents.softmax(-1).amax(-1).double().log()
        return log_sum - self.log_sum_theta - beta * self.rest

    def exponents(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """(1 − α) theta + α teacher (R, V) float32, its row's largest at 0; and how far that is from base + α · ratio.

        alpha (R,) is float64, and so is the sum: where the models disagree by hundreds, the tokens they share lie far
        below either's likeliest, and float32 would leave them five digits.
        """
        weight = alpha[:, None]
        mixed = self.theta.double().mul_(1 - weight).add_(self.teacher.double().mul_(weight))
        if self.ruled_out is not None:
            mixed = mixed.masked_fill_(self.ruled_out, -torch.inf)
        largest = mixed.amax(-1)
        shift = largest - self.largest - alpha * self.centre
        return mixed.sub_(largest[:, None]).float(), shift


def _log_sum(logits: Tensor, largest: Tensor) -> Tensor:
    return (logits - largest[:, None]).exp_().sum(-1).double().log()
