"""How much of the teacher: α (R,) float64 for a pair of distributions, by each method.

    kl_symmetry   the α that minimises log Z; there KL(q‖π_θ) = KL(q‖π_t) = −log Z
    entropy       H(π_θ) / (H(π_θ) + H(π_t)), ½ where both are certain
    ess_balance   the α with Σ π_θ²/q = Σ π_t²/q, that is log Z(−α) = log Z(2 − α)
    kl_budget     the largest α with KL(q‖π_θ) = α E_q[d] − log Z ≤ budget

Those that need a search run Newton's method inside a bracket for a fixed number of steps. A row that has arrived
stays where it is, so no row depends on its neighbours, and on a CPU the search ends when all have arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ramify.sampling.pair import Moments, Pair

STEPS = 10  # of kl_symmetry; one more is taken where the mixture itself is formed
BALANCE_STEPS = STEPS + 1  # of ess_balance, which has no last step there
IDENTICAL = 1e-4  # models whose |d| stay below this: α is ½ to within as much
SLACK = 1e-4  # more than the rounding of float32 can put the search's answer off, and its last step never more
EDGE = 1e-6  # never 0 or 1, which would let tokens back in that the other model rules out
# What float32 makes of E[d]: d has its own rounding, exponents of the size of d have more, up to a limit.
ROUNDING = 1e-7
NOISY_SPAN = 16
MOST_NOISE = 10.0
LEAST_FALL = 1e-5  # of the rise: the fall is a difference, and below that it is rounding
NEAR = 1e-7  # E[d]² beside the variance of d: a step so small is the last one needed
SETTLED = 1e-7  # ess_balance's last step
LEAST_GROWTH = 1e-300  # ess_balance divides by it
BUDGET_STEPS = 14
SPARED = 1e-4  # of a budget: what rounding may take, so that it holds all the same
SPENT = 5e-5  # a budget is spent when no more of it than this is left, or overdrawn before what is spared


class Tangent(NamedTuple):
    """One end of each row's bracket, and log Z and its slope there: (R,) each."""

    alpha: Tensor
    value: Tensor
    slope: Tensor

    def moved(self, rows: Tensor, *target: Tensor) -> Tangent:
        """These rows (R,) bool to the target's alpha, value and slope."""
        return Tangent(*(torch.where(rows, new, old) for new, old in zip(target, self, strict=True)))


def kl_symmetry(pair: Pair) -> tuple[Tensor, Tensor]:
    """α, the root of E_q[d], which grows with α; and whether it was sought (R,) bool, and so may be refined."""
    zero, one = torch.zeros_like(pair.rest), torch.ones_like(pair.rest)
    at_zero, at_one = (zero, zero) if pair.ruled_out is None else (pair.at(zero)[1], pair.at(one)[1])
    low, high = Tangent(zero, at_zero, pair.slopes[0]), Tangent(one, at_one, pair.slopes[1])
    # Only supports that differ may leave no root between the ends; elsewhere such a slope is rounding.
    differ = pair.theta_alone | pair.teacher_alone
    stays_low, stays_high = differ & (low.slope >= 0), differ & (high.slope <= 0)
    is_half = (pair.span <= IDENTICAL) | pair.is_disjoint
    alpha = torch.where(is_half, 0.5, _crossing(low, high))
    alpha = torch.where(stays_low, EDGE, torch.where(stays_high, 1 - EDGE, alpha)).float().double()
    sought = ~(is_half | stays_low | stays_high)
    noise = ROUNDING * pair.span * (1 + pair.span / NOISY_SPAN).clamp_max(MOST_NOISE)
    arrived = ~sought
    for _ in range(STEPS):
        if alpha.device.type == "cpu" and bool(arrived.all()):
            break
        probabilities, value = pair.at(alpha)
        here = pair.moments(probabilities)
        low = low.moved(~arrived & (here.mean < 0), alpha, value, here.mean)
        high = high.moved(~arrived & (here.mean >= 0), alpha, value, here.mean)
        step = alpha + correction(here)
        is_inside = (step >= low.alpha) & (step <= high.alpha)
        following = torch.where(is_inside, step, _crossing(low, high))
        # Where E[d] is as good as 0, its sign and all that follows from it may be noise.
        is_root = here.mean.abs() <= noise
        # What Newton leaves after a step is its square.
        is_near = is_inside & (here.mean.square() <= NEAR * here.variance)
        alpha = torch.where(arrived | (is_root & ~is_near), alpha, following).float().double()
        arrived = arrived | is_root | is_near
    return alpha, sought


def _crossing(low: Tangent, high: Tangent) -> Tensor:
    """Where two tangents of a convex function meet; halfway if rounding puts that outside."""
    rise = (low.value - low.slope * low.alpha) - (high.value - high.slope * high.alpha)
    crossing = rise / (high.slope - low.slope)
    return torch.where((crossing > low.alpha) & (crossing < high.alpha), crossing, (low.alpha + high.alpha) / 2)


def correction(here: Moments) -> Tensor:
    """Newton's step towards E[d] = 0, taken on log E[d; d > 0] − log E[−d; d < 0].

    Both logarithms are nearly lines in α, the first rising and the second falling, even where E[d] itself is flat, or
    steep at one α alone: models that disagree by hundreds need no more steps than models that nearly agree.
    NaN where one of the two is nothing beside the other.
    """
    fall, fall_square = here.rise - here.mean, here.square - here.rise_square
    fall = torch.where(fall > LEAST_FALL * here.rise, fall, torch.nan)
    excess = here.rise.log() - fall.log()
    growth = here.rise_square / here.rise + fall_square / fall
    return -excess / growth


def ess_balance(pair: Pair) -> Tensor:
    """The root of log Z(−α) − log Z(2 − α), which grows with α from at most 0 at 0 to at least 0 at 1."""
    low, high = torch.zeros_like(pair.rest), torch.ones_like(pair.rest)
    alpha = torch.full_like(low, 0.5)
    arrived = (pair.span <= IDENTICAL) | pair.is_disjoint
    for _ in range(BALANCE_STEPS):
        if alpha.device.type == "cpu" and bool(arrived.all()):
            break
        (q_before, before), (q_beyond, beyond) = pair.at(-alpha), pair.at(2 - alpha)
        excess, growth = before - beyond, (pair.mean(q_beyond) - pair.mean(q_before)).clamp_min(LEAST_GROWTH)
        is_low = ~arrived & (excess < 0)
        low, high = torch.where(is_low, alpha, low), torch.where(~arrived & (excess >= 0), alpha, high)
        step = alpha - excess / growth
        inside = (step >= low) & (step <= high)
        following = torch.where(inside, step, (low + high) / 2).float().double()
        settled = (following - alpha).abs() <= SETTLED
        alpha = torch.where(arrived, alpha, following)
        arrived = arrived | settled
    return alpha


def kl_budget(pair: Pair, budget: float) -> Tensor:
    """KL(q‖π_θ) grows with α, and its root is nearly a line: Newton's method on that, inside a bracket.

    In float64, of which a small budget needs the digits.
    """
    base, ratio = pair.base.double(), pair.ratio.double()
    of_theta = (pair.theta.double() - pair.largest[:, None]).logsumexp(-1)

    def spent_at(alpha: Tensor) -> tuple[Tensor, Tensor]:
        """KL(q‖π_θ) and its slope, (R,) each."""
        exponents = torch.addcmul(base, alpha[:, None], ratio)
        probabilities = exponents.softmax(-1)
        mean = (probabilities * ratio).sum(-1)
        variance = (probabilities * (ratio - mean[:, None]).square()).sum(-1)
        return (alpha * mean - exponents.logsumexp(-1) + of_theta).clamp_min(0), alpha * variance

    zero, one = torch.zeros_like(of_theta), torch.ones_like(of_theta)
    wanted = budget * (1 - SPARED)
    # Where the teacher rules tokens out, any of its weight costs what the student would have given them.
    stays_low = pair.theta_alone & (spent_at(zero)[0] > wanted)
    of_teacher, _ = spent_at(one)
    stays_high = of_teacher <= wanted
    low, high = zero, one
    alpha = (wanted / of_teacher.clamp_min(wanted)).sqrt()
    arrived = stays_low | stays_high | pair.is_disjoint
    for _ in range(BUDGET_STEPS):
        if alpha.device.type == "cpu" and bool(arrived.all()):
            break
        spent, slope = spent_at(alpha)
        is_spent = (spent - wanted).abs() <= SPENT * budget
        low = torch.where(~arrived & ((spent <= wanted) | is_spent), alpha, low)
        high = torch.where(~arrived & (spent > wanted), alpha, high)
        step = alpha + 2 * spent.sqrt() * (wanted**0.5 - spent.sqrt()) / slope.clamp_min(LEAST_GROWTH)
        is_inside = (step > low) & (step < high)
        alpha = torch.where(arrived | is_spent, alpha, torch.where(is_inside, step, (low + high) / 2))
        arrived = arrived | is_spent
    # Whoever has not arrived takes the most that is known to be within.
    differ = pair.theta_alone | pair.teacher_alone
    found = torch.where(stays_high, torch.where(differ, 1 - EDGE, one), torch.where(stays_low, zero, low))
    return torch.where(pair.is_disjoint, 0.5, found)


def entropy(theta: Tensor, teacher: Tensor) -> Tensor:
    """From logits (R, V)."""
    of_theta, of_teacher = _entropy(theta), _entropy(teacher)
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
