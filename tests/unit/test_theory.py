"""Each identity of docs/theory.md, on distributions in float64. The page names these tests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import mixture_reference as reference

ALPHAS = [place / 20 for place in range(21)]
# The page's worked example, over four tokens.
THETA = torch.tensor([0.70, 0.20, 0.09, 0.01], dtype=torch.float64).log()
TEACHER = torch.tensor([0.05, 0.15, 0.30, 0.50], dtype=torch.float64).log()


def some_pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for scale in (0.1, 1.0, 4.0, 12.0):
        for _ in range(5):
            logits = torch.randn(2, 50, generator=generator, dtype=torch.float64) * scale
            made.append((reference.log_probabilities(logits[0]), reference.log_probabilities(logits[1])))
    return made


PAIRS = some_pairs()


def test_the_geometric_mixture_minimises_the_weighted_divergences() -> None:
    generator = torch.Generator().manual_seed(1)
    for theta, teacher in PAIRS:
        for alpha in (0.2, 0.5, 0.9):
            q = reference.mixture(theta, teacher, alpha)

            def cost(p: Tensor, alpha: float = alpha, theta: Tensor = theta, teacher: Tensor = teacher) -> float:
                return (1 - alpha) * reference.divergence(p, theta) + alpha * reference.divergence(p, teacher)

            least = cost(q)
            assert least == pytest.approx(-reference.log_z(theta, teacher, alpha), abs=1e-10)
            for _ in range(20):
                noise = torch.randn(len(q), generator=generator, dtype=torch.float64)
                other = reference.log_probabilities(q + 0.1 * noise)
                assert cost(other) - least == pytest.approx(reference.divergence(other, q), abs=1e-9)
                assert cost(other) >= least


def test_derivatives_of_log_z_are_the_mean_and_variance_of_the_log_ratio() -> None:
    step = 1e-4
    for theta, teacher in PAIRS:
        for alpha in (0.1, 0.5, 0.8):
            before, here, after = (reference.log_z(theta, teacher, alpha + move) for move in (-step, 0.0, step))
            q, d = reference.mixture(theta, teacher, alpha).exp(), teacher - theta
            mean = float((q * d).sum())
            variance = float((q * (d - mean).square()).sum())
            assert (after - before) / (2 * step) == pytest.approx(mean, rel=1e-4, abs=1e-5)
            assert (after - 2 * here + before) / step**2 == pytest.approx(variance, rel=1e-3, abs=1e-4)


def test_divergences_of_the_mixture_in_terms_of_log_z() -> None:
    for theta, teacher in PAIRS:
        for alpha in (0.0, 0.3, 1.0):
            q = reference.mixture(theta, teacher, alpha)
            mean, log_z = reference.mean_ratio(theta, teacher, alpha), reference.log_z(theta, teacher, alpha)
            assert reference.divergence(q, theta) == pytest.approx(alpha * mean - log_z, abs=1e-9)
            assert reference.divergence(q, teacher) == pytest.approx((alpha - 1) * mean - log_z, abs=1e-9)


def test_the_symmetric_point_minimises_log_z() -> None:
    for theta, teacher in PAIRS:
        alpha = reference.kl_symmetry(theta, teacher)
        q = reference.mixture(theta, teacher, alpha)
        least = reference.log_z(theta, teacher, alpha)
        assert reference.divergence(q, theta) == pytest.approx(-least, abs=1e-8)
        assert reference.divergence(q, teacher) == pytest.approx(-least, abs=1e-8)
        for other in ALPHAS:
            assert reference.log_z(theta, teacher, other) >= least - 1e-12


def test_the_symmetric_point_is_the_least_of_the_worse_divergence() -> None:
    """No distribution at all, inside the family or not, is nearer to both models than q*."""
    generator = torch.Generator().manual_seed(2)
    for theta, teacher in PAIRS:
        alpha = reference.kl_symmetry(theta, teacher)
        q = reference.mixture(theta, teacher, alpha)
        radius = max(reference.divergence(q, theta), reference.divergence(q, teacher))
        for scale in (0.01, 0.3, 3.0):
            noise = torch.randn(len(q), generator=generator, dtype=torch.float64)
            other = reference.log_probabilities(q + scale * noise)
            worse = max(reference.divergence(other, theta), reference.divergence(other, teacher))
            assert worse >= radius - 1e-8


def test_in_one_context_everything_moves_one_way_with_alpha() -> None:
    for theta, teacher in PAIRS:
        mixtures = [reference.mixture(theta, teacher, alpha) for alpha in ALPHAS]
        to_theta = [reference.divergence(q, theta) for q in mixtures]
        to_teacher = [reference.divergence(q, teacher) for q in mixtures]
        gains = [reference.mean_ratio(theta, teacher, alpha) for alpha in ALPHAS]
        for numbers in (to_theta, to_teacher[::-1], gains):
            assert all(after > before for before, after in pairwise(numbers))


def test_sample_sizes_in_terms_of_log_z() -> None:
    for theta, teacher in PAIRS:
        for alpha in (0.2, 0.5, 0.7):
            q, here = reference.mixture(theta, teacher, alpha), reference.log_z(theta, teacher, alpha)
            for model, beta in ((theta, -alpha), (teacher, 2 - alpha)):
                expected = math.exp(-here - reference.log_z(theta, teacher, beta))
                assert reference.sample_size(model, q) == pytest.approx(expected, rel=1e-8)


def test_ess_balance_has_one_answer_and_balances() -> None:
    for theta, teacher in PAIRS:
        excess = [reference.log_z(theta, teacher, -a) - reference.log_z(theta, teacher, 2 - a) for a in ALPHAS]
        assert excess[0] < 0 < excess[-1]
        assert all(after > before for before, after in pairwise(excess))
        q = reference.mixture(theta, teacher, reference.ess_balance(theta, teacher))
        assert reference.sample_size(theta, q) == pytest.approx(reference.sample_size(teacher, q), rel=1e-8)


def test_the_other_direction_is_balanced_by_a_half_for_every_pair() -> None:
    """Σ q²/π_θ = Z(2α)/Z(α)² and Σ q²/π_t = Z(2α − 1)/Z(α)²: both are 1/Z(½)² at ½, since Z(0) = Z(1) = 1."""
    for theta, teacher in PAIRS:
        q = reference.mixture(theta, teacher, 0.5)
        of_theta, of_teacher = (float((2 * q - model).logsumexp(-1)) for model in (theta, teacher))
        assert of_theta == pytest.approx(of_teacher, abs=1e-9)
        assert of_theta == pytest.approx(-2 * reference.log_z(theta, teacher, 0.5), abs=1e-9)


def information(theta: Tensor, teacher: Tensor, alpha: float) -> float:
    """The Fisher information of α in one token of q_α."""
    q, d = reference.mixture(theta, teacher, alpha).exp(), teacher - theta
    return float((q * (d - (q * d).sum()).square()).sum())


def test_divergences_are_integrals_of_the_fisher_information() -> None:
    def integral(function: Callable[[float], float], start: float, end: float) -> float:
        """Simpson's rule."""
        width = (end - start) / 400
        values = [function(start + width * place) for place in range(401)]
        return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    for theta, teacher in (*PAIRS[:3], PAIRS[6], (THETA, TEACHER)):
        for alpha in (0.3, reference.kl_symmetry(theta, teacher)):
            q = reference.mixture(theta, teacher, alpha)

            def near_theta(s: float, theta: Tensor = theta, teacher: Tensor = teacher) -> float:
                return s * information(theta, teacher, s)

            def near_teacher(s: float, theta: Tensor = theta, teacher: Tensor = teacher) -> float:
                return (1 - s) * information(theta, teacher, s)

            assert integral(near_theta, 0, alpha) == pytest.approx(reference.divergence(q, theta), rel=1e-6)
            assert integral(near_teacher, alpha, 1) == pytest.approx(reference.divergence(q, teacher), rel=1e-6)


def test_the_log_ratio_meets_the_bound_at_every_alpha() -> None:
    """d's own variance is the Cramér–Rao bound for its mean, (slope of the mean)² / information, wherever α is."""
    step = 1e-4
    for theta, teacher in PAIRS[:10]:
        for alpha in (0.1, 0.5, 0.8):
            before, after = (reference.mean_ratio(theta, teacher, alpha + move) for move in (-step, step))
            slope, told = (after - before) / (2 * step), information(theta, teacher, alpha)
            assert slope**2 / told == pytest.approx(told, rel=1e-4)


def test_the_most_information_is_not_at_the_symmetric_point() -> None:
    places = [place / 1000 for place in range(1001)]

    def most(theta: Tensor, teacher: Tensor) -> float:
        return max(places, key=lambda alpha: information(theta, teacher, alpha))

    symmetric, best = reference.kl_symmetry(THETA, TEACHER), most(THETA, TEACHER)
    numbers = [information(THETA, TEACHER, alpha) for alpha in (best, symmetric)]
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    assert f"α = {best:.3f} ({numbers[0]:.3f}, against {numbers[1]:.3f} at {symmetric:.4f})" in page
    assert sum(most(*pair) in {0, 1} for pair in PAIRS[:5]) >= 3, "for models that nearly agree, often an end"


def test_whatever_is_measured_is_off_by_no_more_than_chi_squared_allows() -> None:
    generator = torch.Generator().manual_seed(4)
    for theta, teacher in (*PAIRS[:10], (THETA, TEACHER)):
        log_q = reference.mixture(theta, teacher, reference.ess_balance(theta, teacher))
        q = log_q.exp()
        bounds = []
        for log_p in (theta, teacher):
            p, chi_squared = log_p.exp(), 1 / reference.sample_size(log_p, log_q) - 1
            bounds.append(chi_squared)
            measures = [torch.randn(len(q), generator=generator, dtype=torch.float64) for _ in range(20)]
            for f in (*measures, p / q):
                off = float(((p - q) * f).sum()) ** 2
                variance = float((q * f.square()).sum() - (q * f).sum().square())
                assert off <= chi_squared * variance * (1 + 1e-9)
            assert off == pytest.approx(chi_squared * variance, rel=1e-6), "the last of them reaches it"
        assert bounds[0] == pytest.approx(bounds[1], rel=1e-6), "balanced by ess_balance"


def test_near_agreement_both_tend_to_a_half_one_three_times_as_fast() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        logits, turn = torch.randn(2, 50, generator=generator, dtype=torch.float64)
        theta = reference.log_probabilities(logits)
        teacher = reference.log_probabilities(logits + 1e-3 * turn.square())
        p, d = theta.exp(), teacher - theta
        centred = d - (p * d).sum()
        skew = float((p * centred**3).sum() / (p * centred**2).sum())
        assert reference.kl_symmetry(theta, teacher) - 0.5 == pytest.approx(skew / 24, rel=0.02)
        assert reference.ess_balance(theta, teacher) - 0.5 == pytest.approx(skew / 8, rel=0.02)


def worked_example() -> list[tuple[str, list[float]]]:
    """The page's table: method, α, KL to each, effective sample size for each."""
    rows = []
    for name, alpha in (
        ("kl_symmetry", reference.kl_symmetry(THETA, TEACHER)),
        ("fixed, ½", 0.5),
        ("entropy", reference.entropy(THETA, TEACHER)),
        ("ess_balance", reference.ess_balance(THETA, TEACHER)),
    ):
        q = reference.mixture(THETA, TEACHER, alpha)
        numbers = [reference.divergence(q, model) for model in (THETA, TEACHER)]
        numbers += [reference.sample_size(model, q) for model in (THETA, TEACHER)]
        rows.append((name, [alpha, *numbers]))
    return rows


def test_equal_divergences_are_not_equal_sample_sizes() -> None:
    by_name = dict(worked_example())
    _, to_theta, to_teacher, of_theta, of_teacher = by_name["kl_symmetry"]
    assert to_theta == pytest.approx(to_teacher, abs=1e-9)
    assert of_theta > 1.2 * of_teacher
    _, to_theta, to_teacher, of_theta, of_teacher = by_name["ess_balance"]
    assert of_theta == pytest.approx(of_teacher, abs=1e-9)
    assert abs(to_theta - to_teacher) > 0.02


def test_the_pages_table_is_the_computed_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    for name, numbers in worked_example():
        row = "| " + " | ".join([name, *(f"{number:.4f}" for number in numbers)]) + " |"
        assert row in page, f"docs/theory.md should say: {row}"


def test_every_test_that_the_page_names_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named
    here = Path(__file__).read_text() + (Path(__file__).parent / "test_mixture.py").read_text()
    assert {name for name in named if f"def {name}(" not in here} == set()
