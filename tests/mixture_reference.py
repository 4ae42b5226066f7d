"""The mixture of two distributions written out slowly in float64: bisection, plain sums, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ramify.sampling.mixture import Mixed


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.double() - logits.double().logsumexp(-1)


def log_z(log_theta: Tensor, log_teacher: Tensor, beta: float) -> float:
    """log Σ π_θ^(1−β) π_t^β over the tokens (V,) that both allow."""
    both = (log_theta > -math.inf) & (log_teacher > -math.inf)
    return float(((1 - beta) * log_theta[both] + beta * log_teacher[both]).logsumexp(-1))


def mixture(log_theta: Tensor, log_teacher: Tensor, alpha: float) -> Tensor:
    """log q (V,)."""
    if alpha in {0, 1}:
        return log_teacher if alpha else log_theta
    return log_probabilities((1 - alpha) * log_theta + alpha * log_teacher)


def mean_ratio(log_theta: Tensor, log_teacher: Tensor, alpha: float) -> float:
    """E_q[log π_t − log π_θ] over what both allow."""
    both = (log_theta > -math.inf) & (log_teacher > -math.inf)
    a, b = log_theta[both], log_teacher[both]
    return float((((1 - alpha) * a + alpha * b).softmax(-1) * (b - a)).sum())


def bisect(function: Callable[[float], float]) -> float:
    """Where a growing function crosses 0 between 0 and 1, else the end that is nearest."""
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def kl_symmetry(log_theta: Tensor, log_teacher: Tensor) -> float:
    return bisect(lambda alpha: mean_ratio(log_theta, log_teacher, alpha))


def ess_balance(log_theta: Tensor, log_teacher: Tensor) -> float:
    return bisect(lambda alpha: log_z(log_theta, log_teacher, -alpha) - log_z(log_theta, log_teacher, 2 - alpha))


def entropy(log_theta: Tensor, log_teacher: Tensor) -> float:
    of_theta, of_teacher = entropy_of(log_theta), entropy_of(log_teacher)
    return of_theta / (of_theta + of_teacher)


def entropy_of(logarithms: Tensor) -> float:
    """Of the likeliest token −log p = log(1 + what the others weigh beside it), which float64 would round to 0."""
    ordered = logarithms[logarithms > -math.inf].sort().values
    top = ordered[-1]
    below = [float(difference) for difference in ordered[:-1] - top]
    others = sum(math.exp(x) for x in below)
    return math.log1p(others) + sum(math.exp(x) * -x for x in below) / (1 + others)


def divergence(log_q: Tensor, log_p: Tensor) -> float:
    """KL(q‖p)."""
    kept = log_q > -math.inf
    return float((log_q[kept].exp() * (log_q[kept] - log_p[kept])).sum())


def sample_size(log_p: Tensor, log_q: Tensor) -> float:
    """1 / Σ p²/q, and 0 where q does not reach all of p."""
    kept = log_p > -math.inf
    return math.exp(-float((2 * log_p[kept] - log_q[kept]).logsumexp(-1)))


@dataclass(frozen=True)
class Truth:
    """What `Mixed` should say of one row."""

    log_q: Tensor
    log_z: float
    kl_theta: float
    kl_teacher: float
    ess_theta: float
    ess_teacher: float

    @classmethod
    def of(cls, theta: Tensor, teacher: Tensor, alpha: float) -> Truth:
        a, b = log_probabilities(theta), log_probabilities(teacher)
        q = mixture(a, b, alpha)
        return cls(
            q,
            0.0 if alpha in {0, 1} else log_z(a, b, alpha),
            divergence(q, a),
            divergence(q, b),
            sample_size(a, q),
            sample_size(b, q),
        )


def worst_ratio(theta: Tensor, teacher: Tensor) -> float:
    """max(1, max |log π_t − log π_θ|), by which tolerances are measured."""
    a, b = log_probabilities(theta), log_probabilities(teacher)
    both = (a > -math.inf) & (b > -math.inf)
    return max(1.0, float((b[both] - a[both]).abs().max()))


def check_row(made: Mixed, row: int, theta: Tensor, teacher: Tensor) -> None:
    """Everything that is said of one row, at the α it was given."""
    alpha = float(made.alpha[row])
    truth = Truth.of(theta[row], teacher[row], alpha)
    scale = worst_ratio(theta[row], teacher[row])
    q = log_probabilities(made.logits[row])
    if 0 < alpha < 1:
        assert torch.allclose(q, made.logits[row].double(), atol=1e-5), (
            "normalised, but where one model's own are taken"
        )
    assert (q.exp() - truth.log_q.exp()).abs().max() < 2e-6
    assert torch.allclose(q, truth.log_q, rtol=1e-5, atol=1e-5)
    assert float(made.log_z[row]) == pytest.approx(truth.log_z, rel=1e-6, abs=1e-6)
    assert float(made.kl_theta[row]) == pytest.approx(truth.kl_theta, rel=1e-5, abs=1e-6 * scale)
    assert float(made.kl_teacher[row]) == pytest.approx(truth.kl_teacher, rel=1e-5, abs=1e-6 * scale)
    for said, true in ((made.ess_theta, truth.ess_theta), (made.ess_teacher, truth.ess_teacher)):
        # Where the models disagree by hundreds the sum is a power of e with as many digits before the point.
        assert float(said[row]) == pytest.approx(true, rel=1e-6 * scale + 1e-5, abs=1e-300)


def pairs(name: str, rows: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits theta, teacher (rows, vocab_size) float32 of one kind."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.randn(rows, vocab_size, generator=generator) * scale

    theta, teacher = noise(3.0), noise(3.0)
    if name == "peaked":
        return theta * 10, teacher * 10
    if name == "very peaked":
        return theta * 100, teacher * 100
    if name == "one peaked":
        return theta, teacher * 30
    if name.startswith("nearly identical"):
        return theta, theta + teacher * float(name.rsplit(maxsplit=1)[-1])
    if name == "shifted":  # nearly identical up to a constant that softmax does not see
        return theta, theta + 17 + teacher * 1e-2
    if name.startswith("nearly disjoint"):
        # Each puts its mass on one half and next to none on the other: Σ √(π_θ π_t) is about that of the name.
        half = vocab_size // 2
        gap = 2 * math.log(float(name.rsplit(maxsplit=1)[-1]))
        theta[:, :half] += gap
        teacher[:, half:] += gap
        return theta, teacher
    if name == "rarely different":
        rare = torch.rand(rows, vocab_size, generator=generator) < 0.01
        return theta, theta + teacher * 5 * rare
    assert name == "random"
    return theta, teacher


KINDS = (
    "random",
    "peaked",
    "very peaked",
    "one peaked",
    "nearly identical 1e-1",
    "nearly identical 1e-3",
    "nearly identical 1e-6",
    "shifted",
    "nearly disjoint 1e-3",
    "nearly disjoint 1e-15",
    "nearly disjoint 1e-30",
    "rarely different",
)
