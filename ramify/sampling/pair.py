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
    """Of d under some q: (R,) float64 each."""

    mean: Tensor  # E[d]
    square: Tensor  # E[d²]
    rise: Tensor  # E[d] over the tokens with d > 0 alone
    rise_square: Tensor  # E[d²] over them

    @property
    def variance(self) -> Tensor:
        return (self.square - self.mean.square()).clamp_min(0)


@dataclass(frozen=True, slots=True)
class Pair:
    """R rows over V tokens. Tokens that either model rules out (minus infinity) have no part in any mixture."""

    theta: Tensor  # (R, V) float32 logits
    teacher: Tensor  # (R, V)
    base: Tensor  # (R, V) theta less its row's largest; minus infinity where either model rules the token out
    ratio: Tensor  # (R, V) d, up to `rest`: d = ratio − rest; 0 where either model rules the token out
    largest: Tensor  # (R,) of theta
    largest_teacher: Tensor  # (R,)
    centre: Tensor  # (R,) what was taken from teacher − theta to make `ratio`
    rest: Tensor  # (R,) what float32 could not take from it
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

        at_theta, at_teacher = base.softmax(-1), shared_teacher.softmax(-1)
        centre = (at_theta * ratio).sum(-1)  # any number near the mean will do
        ratio = ratio.sub_(centre[:, None])
        # The likeliest token's probability is one over the sum of exponentials.
        log_sum_theta, log_sum_teacher = (-q.amax(-1).double().log() for q in (at_theta, at_teacher))
        if ruled_out is not None:
            log_sum_theta = torch.where(theta_alone, _log_sum(theta, largest), log_sum_theta)
            log_sum_teacher = torch.where(teacher_alone, _log_sum(teacher, largest_teacher), log_sum_teacher)
        rest = (largest_teacher.double() - largest) + (log_sum_teacher - log_sum_theta) - centre
        is_small = (highest - centre < SMALL) & ~(theta_alone | teacher_alone)
        if theta.device.type != "cpu" or bool(is_small.any()):
            # log E_θ[e^ratio], not two sums taken from each other: keeps α's digits where the models nearly agree.
            grown = ratio.clamp_max(SMALL).expm1_()
            grown = grown if ruled_out is None else grown.masked_fill_(ruled_out, 0.0)
            rest = torch.where(is_small, grown.mul_(at_theta).sum(-1).double().log1p(), rest)
        most = rest.float()
        ratio = ratio.sub_(most[:, None])
        if ruled_out is not None:
            ratio = ratio.masked_fill_(ruled_out, 0.0)
        centre, rest = centre.double() + most, rest - most
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
            (at_theta.mul_(ratio).sum(-1) - rest, at_teacher.mul_(ratio).sum(-1) - rest),
            torch.maximum(centre - lowest, highest - centre),
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

    def at(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """q_β (R, V) and log Z (R,) float64 at beta (R,) of any value, over the tokens that both models allow."""
        exponents = torch.addcmul(self.base, beta.float()[:, None], self.ratio)
        probabilities = exponents.softmax(-1)
        return probabilities, log_sum(exponents, probabilities) - self.log_sum_theta - beta * self.rest

    def moments(self, probabilities: Tensor) -> Moments:
        """Of d under probabilities (R, V), whose memory is used up."""
        weighted = probabilities.mul_(self.ratio)
        mean = weighted.sum(-1) - self.rest
        rising = weighted.clamp_min(0)
        rise = rising.sum(-1).double()
        rise_square = rising.mul_(self.ratio).sum(-1).double()
        return Moments(mean, weighted.mul_(self.ratio).sum(-1).double(), rise, rise_square)

    def mean(self, probabilities: Tensor) -> Tensor:
        """The mean of d alone, likewise."""
        return probabilities.mul_(self.ratio).sum(-1) - self.rest

    def exponents(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """(1 − α) theta + α teacher (R, V) float32, less its row's largest; and (R,) how far
        base + α · ratio lies above that.

        alpha (R,) is float64, and so is the sum: where the models disagree by hundreds, the tokens they share lie far
        below either's likeliest, and float32 would leave them five digits.
        """
        weight = alpha[:, None]
        mixed = self.theta.double().mul_(1 - weight).add_(self.teacher.double().mul_(weight))
        if self.ruled_out is not None:
            mixed = mixed.masked_fill_(self.ruled_out, -torch.inf)
        largest = mixed.amax(-1)
        lacking = largest - self.largest - alpha * self.centre
        return mixed.sub_(largest[:, None]).float(), lacking


def log_sum(exponents: Tensor, probabilities: Tensor) -> Tensor:
    """(R,) float64: log Σ exp of exponents (R, V), of which probabilities are the softmax."""
    return exponents.amax(-1).double() - probabilities.amax(-1).double().log()


def _log_sum(logits: Tensor, largest: Tensor) -> Tensor:
    return (logits - largest[:, None]).exp_().sum(-1).double().log()
