"""How much of the teacher: α (R,) float64 for a pair of distributions, by each method.

    kl_symmetry   the α that minimises log Z; there KL(q‖π_θ) = KL(q‖π_t) = −log Z
    entropy       H(π_θ) / (H(π_θ) + H(π_t)), ½ where both are certain
    ess_balance   the α with Σ π_θ²/q = Σ π_t²/q, that is log Z(−α) = log Z(2 − α)

The two that need a search run Newton's method inside a bracket for a fixed number of steps. A row that has arrived
stays where it is, so nothing depends on who stands beside it, and on a CPU the search ends when all have arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ramify.sampling.pair import Moments, Pair

STEPS = 10  # and one more where the mixture itself is formed
ARRIVED = 1e-7
IDENTICAL = 1e-4  # models whose |d| stay below this: α is ½ to within as much
SLACK = 1e-4  # how far rounding may have put the search's bracket from the answer, at most
EDGE = 1e-6  # never 0 or 1, which would let tokens back in that the other model rules out


class Tangent(NamedTuple):
    """log Z at one end of each row's bracket: (R,) each."""

    place: Tensor
    value: Tensor
    slope: Tensor

    def moved(self, rows: Tensor, place: Tensor, value: Tensor, slope: Tensor) -> Tangent:
        new = (place, value, slope)
        return Tangent(*(torch.where(rows, item, old) for item, old in zip(new, self, strict=True)))


def kl_symmetry(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """α, and the bracket (low, high) that holds the answer: a root of the mean of d under q_α, which grows with α.

    log Z is convex, 0 at both ends where supports agree. Where Newton's step leaves the bracket (log Z is nearly a
    broken line when the models disagree much), the tangents at the bracket's ends cross at a better place.
    """
    zero, one = torch.zeros_like(pair.rest), torch.ones_like(pair.rest)
    at_zero, at_one = (zero, zero) if pair.ruled_out is None else (pair.log_z(zero), pair.log_z(one))
    low, high = Tangent(zero, at_zero, pair.slopes[0]), Tangent(one, at_one, pair.slopes[1])
    # Only supports that differ may leave no minimum between the ends; elsewhere such a slope is rounding.
    differ = pair.theta_alone | pair.teacher_alone
    falls, rises = differ & (high.slope <= 0), differ & (low.slope >= 0)
    is_half = (pair.span <= IDENTICAL) | pair.is_disjoint
    alpha = torch.where(rises, EDGE, torch.where(falls, 1 - EDGE, _crossing(low, high)))
    alpha = torch.where(is_half, 0.5, alpha).float().double()
    arrived = is_half | falls | rises
    lowest, highest = torch.where(arrived, alpha, -SLACK), torch.where(arrived, alpha, 1 + SLACK)
    for _ in range(STEPS):
        if alpha.device.type == "cpu" and bool(arrived.all()):
            break
        here = pair.at(alpha.float())
        value = here.log_sum - pair.log_sum_theta - alpha * pair.rest
        slope = here.mean - pair.rest
        low = low.moved(~arrived & (slope < 0), alpha, value, slope)
        high = high.moved(~arrived & (slope >= 0), alpha, value, slope)
        step = newton(alpha, slope, here)
        following = torch.where((step > low.place) & (step < high.place), step, _crossing(low, high))
        # The last step is small enough for Newton's error, its square, to be nothing beside the noise of float32.
        close = (slope.square() <= ARRIVED * here.variance) | (slope.abs() <= ARRIVED * pair.span.clamp_min(1))
        alpha = torch.where(arrived, alpha, following).float().double()
        arrived = arrived | close
    # The ends were judged by rounded slopes, hence the slack.
    return alpha, torch.maximum(lowest, low.place - SLACK), torch.minimum(highest, high.place + SLACK)


def newton(alpha: Tensor, slope: Tensor, here: Moments) -> Tensor:
    return alpha - slope / here.variance.clamp_min(1e-300)


def _crossing(low: Tangent, high: Tangent) -> Tensor:
    """Where the tangents at two places of a convex function meet; halfway if rounding puts that outside."""
    rise = (low.value - low.slope * low.place) - (high.value - high.slope * high.place)
    crossing = rise / (high.slope - low.slope)
    return torch.where((crossing > low.place) & (crossing < high.place), crossing, (low.place + high.place) / 2)


def ess_balance(pair: Pair) -> Tensor:
    """The root of log Z(−α) − log Z(2 − α), which grows with α from at most 0 at 0 to at least 0 at 1."""
    low, high = torch.zeros_like(pair.rest), torch.ones_like(pair.rest)
    alpha = torch.full_like(low, 0.5)
    arrived = (pair.span <= IDENTICAL) | pair.is_disjoint
    for _ in range(STEPS + 1):
        if alpha.device.type == "cpu" and bool(arrived.all()):
            break
        before, beyond = pair.at((-alpha).float()), pair.at((2 - alpha).float())
        excess = before.log_sum - beyond.log_sum + 2 * pair.rest
        growth = (beyond.mean - before.mean).clamp_min(1e-300)
        is_low = ~arrived & (excess < 0)
        low, high = torch.where(is_low, alpha, low), torch.where(~arrived & (excess >= 0), alpha, high)
        step = alpha - excess / growth
        inside = (step > low) & (step < high)
        following = torch.where(inside, step, torch.where(excess == 0, alpha, (low + high) / 2)).float().double()
        settled = (following - alpha).abs() <= ARRIVED
        alpha = torch.where(arrived, alpha, following)
        arrived = arrived | settled
    return alpha


def entropy(pair: Pair) -> Tensor:
    of_theta, of_teacher = _entropy(pair.theta), _entropy(pair.teacher)
    total = of_theta + of_teacher
    return torch.where(total > 0, of_theta / total, 0.5)


def _entropy(logits: Tensor) -> Tensor:
    """(R,) float64, of softmax(logits (R, V)): log Σ e^x − E[x], x less its largest.

    The likeliest tokens, x = 0, are counted and not summed, so that a model that is all but certain keeps its digits.
    """
    below = logits - logits.amax(-1, keepdim=True)
    weights = below.exp()
    # A token that cannot be drawn contributes nothing: 0 · log 0 = 0.
    spread = -(weights * below.clamp_min(-1e30)).sum(-1).double()
    is_top = below == 0
    count = is_top.sum(-1).double()
    rest = weights.masked_fill_(is_top, 0).sum(-1).double()
    return count.log() + (rest / count).log1p() + spread / (count + rest)
