"""The mixture against float64 closed forms; its ends, bounds, masks and faults; and that no device is asked to wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.config import MixtureConfig
from ramify.errors import InvalidInputError
from ramify.sampling import mixture, processors
from ramify.sampling.alpha import STEPS
from ramify.sampling.mixture import Mixed, mix
from tests import mixture_reference as reference
from tests.mixture_reference import KINDS, check_row, pairs, worst_ratio

ROWS, VOCABULARY = 5, 1000


def scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """temperature: (R,), or one for all rows."""
    return mixture.scale(logits, torch.as_tensor(temperature).expand(len(logits)))


def mixed(theta: Tensor, teacher: Tensor, temperature: Tensor | float = 1.0, **options: Any) -> Mixed:
    return mix(
        scaled(teacher, temperature),
        scaled(theta, temperature),
        MixtureConfig(**options),
        first=options.pop("first", torch.zeros(len(theta), dtype=torch.bool)),
        special_token_ids=torch.tensor([2, 5]),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kl_symmetry_equals_the_closed_forms(kind: str) -> None:
    theta, teacher = pairs(kind, ROWS, VOCABULARY, seed=1)
    made = mixed(theta, teacher)
    for row in range(ROWS):
        a, b = reference.log_probabilities(theta[row]), reference.log_probabilities(teacher[row])
        alpha = float(made.alpha[row])
        scale = worst_ratio(theta[row], teacher[row])
        # What float32 leaves of α where the models nearly agree: q is the same to the last digit for all α there.
        resolution = 1e-6 / min(1.0, float((b - a).abs().max()))
        assert alpha == pytest.approx(reference.kl_symmetry(a, b), abs=max(1e-6, min(resolution, 1e-3)))
        assert abs(reference.mean_ratio(a, b, alpha)) < 1e-6 * scale, "ten times better than promised"
        assert abs(float(made.kl_theta[row] - made.kl_teacher[row])) < 1e-5 * scale
        assert float(made.kl_theta[row]) == pytest.approx(-float(made.log_z[row]), abs=1e-5 * scale)
        check_row(made, row, theta, teacher)
    assert not made.clamped.any()
    assert not made.disjoint.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["entropy", "ess_balance", "fixed"])
def test_other_methods_equal_the_closed_forms(method: str, kind: str) -> None:
    theta, teacher = pairs(kind, ROWS, VOCABULARY, seed=2)
    made = mixed(theta, teacher, alpha_method=method, alpha=0.3 if method == "fixed" else None)
    for row in range(ROWS):
        a, b = reference.log_probabilities(theta[row]), reference.log_probabilities(teacher[row])
        alpha, scale = float(made.alpha[row]), worst_ratio(theta[row], teacher[row])
        if method == "fixed":
            assert alpha == 0.3
        elif method == "entropy":
            # float32 knows no probability under 1e-45: two models that are so certain have none to compare.
            is_certain = max(reference.entropy_of(a), reference.entropy_of(b)) < 1e-37
            assert alpha == pytest.approx(0.5 if is_certain else reference.entropy(a, b), abs=1e-5)
        else:
            assert abs(reference.log_z(a, b, -alpha) - reference.log_z(a, b, 2 - alpha)) < 1e-6 * scale
            if (b - a).abs().max() > 0.2:  # below, all α balance to as many digits
                assert alpha == pytest.approx(reference.ess_balance(a, b), abs=1e-5)
        check_row(made, row, theta, teacher)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1e-3, 0.02, 0.5, 5.0])
def test_a_budget_holds_and_is_spent(kind: str, budget: float) -> None:
    theta, teacher = pairs(kind, ROWS, VOCABULARY, seed=21)
    made = mixed(theta, teacher, alpha_method="kl_budget", kl_budget=budget)
    for row in range(ROWS):
        a, b = reference.log_probabilities(theta[row]), reference.log_probabilities(teacher[row])
        alpha = float(made.alpha[row])
        spent = reference.divergence(reference.mixture(a, b, alpha), a)
        assert spent <= budget
        assert alpha == 1 or spent >= budget * (1 - 3e-4), "and no more would be allowed"
        check_row(made, row, theta, teacher)


@pytest.mark.parametrize("budget", [1e-3, 0.5, 50.0])
def test_a_budget_holds_where_the_models_allow_different_tokens(budget: float) -> None:
    theta, teacher = pairs("random", ROWS, VOCABULARY, seed=22)
    theta[:3, :20], teacher[1:, 15:300] = -math.inf, -math.inf
    made = mixed(theta, teacher, alpha_method="kl_budget", kl_budget=budget)
    for row in range(ROWS):
        a, b = reference.log_probabilities(theta[row]), reference.log_probabilities(teacher[row])
        alpha = float(made.alpha[row])
        spent = reference.divergence(reference.mixture(a, b, alpha), a)
        assert spent <= budget, "never infinite: a token that the student rules out is not drawn"
        if alpha == 0:  # any weight of the teacher's costs what it rules out
            assert reference.divergence(reference.mixture(a, b, 1e-6), a) > budget * (1 - 3e-4)
        elif alpha < 1 - 1e-5:
            assert spent >= budget * (1 - 3e-4)


def test_ess_balance_balances() -> None:
    theta, teacher = pairs("random", 8, VOCABULARY, seed=3)
    made = mixed(theta, teacher, alpha_method="ess_balance")
    assert torch.allclose(made.ess_theta, made.ess_teacher, rtol=1e-4)


@settings(max_examples=150, deadline=None)
@example(vocab_size=28, scale_theta=271.7433914309589, scale_teacher=96.82914125838688, seed=28, temperature=0.8)
@given(
    vocab_size=st.integers(2, 40),
    scale_theta=st.floats(1e-3, 300),
    scale_teacher=st.floats(1e-3, 300),
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 3.0]),
)
def test_the_search_arrives_in_its_fixed_number_of_steps(
    vocab_size: int, scale_theta: float, scale_teacher: float, seed: int, temperature: float
) -> None:
    assert STEPS + 1 <= 12
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(4, vocab_size, generator=generator) * scale_theta
    teacher = torch.randn(4, vocab_size, generator=generator) * scale_teacher
    made = mixed(theta, teacher, temperature)
    both = [scaled(logits, temperature) for logits in (theta, teacher)]
    for row in range(4):
        a, b = (reference.log_probabilities(logits[row]) for logits in both)
        scale = worst_ratio(both[0][row], both[1][row])
        assert abs(reference.mean_ratio(a, b, float(made.alpha[row]))) < 1e-5 * scale
        assert abs(float(made.kl_theta[row] - made.kl_teacher[row])) < 1e-5 * scale
    balanced = mixed(theta, teacher, temperature, alpha_method="ess_balance")
    for row in range(4):
        a, b = (reference.log_probabilities(logits[row]) for logits in both)
        alpha, scale = float(balanced.alpha[row]), worst_ratio(both[0][row], both[1][row])
        assert abs(reference.log_z(a, b, -alpha) - reference.log_z(a, b, 2 - alpha)) < 1e-5 * scale


@pytest.mark.parametrize("method", ["kl_symmetry", "entropy", "ess_balance"])
@pytest.mark.parametrize("shift", [0.0, 12.5])
def test_identical_models_meet_halfway(method: str, shift: float) -> None:
    theta, _ = pairs("random", 3, VOCABULARY, seed=4)
    made = mixed(theta, theta + shift, alpha_method=method)
    assert made.alpha.tolist() == pytest.approx([0.5] * 3, abs=1e-6)
    for numbers in (made.log_z, made.kl_theta, made.kl_teacher):
        assert numbers.abs().max() < 1e-5
    for sizes in (made.ess_theta, made.ess_teacher):
        assert (sizes - 1).abs().max() < 1e-5
    assert torch.allclose(made.logits, theta.log_softmax(-1), atol=1e-5)


def test_certain_models_have_no_entropy_and_meet_halfway() -> None:
    certain = torch.full((1, 8), -math.inf)
    certain[0, 3] = 1.5
    made = mixed(certain, certain, alpha_method="entropy")
    assert made.alpha.tolist() == [0.5]
    assert made.logits.argmax(-1).tolist() == [3]


@pytest.mark.parametrize(("alpha", "is_teacher"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_weight_of_0_or_1_leaves_the_one_models_logits_untouched(
    alpha: float, is_teacher: bool, temperature: float
) -> None:
    theta, teacher = pairs("random", ROWS, VOCABULARY, seed=5)
    made = mixed(theta, teacher, torch.full((ROWS,), temperature), alpha_method="fixed", alpha=alpha)
    alone = teacher if is_teacher else theta
    if temperature == 0.7:
        alone = processors.temperature(alone, torch.full((ROWS,), 0.7))
    assert torch.equal(made.logits, alone)
    assert made.log_z.eq(0).all()
    own, other = (made.kl_teacher, made.kl_theta) if is_teacher else (made.kl_theta, made.kl_teacher)
    assert own.eq(0).all()
    for row in range(ROWS):
        logs = [
            reference.log_probabilities(scaled(logits, temperature)[row])
            for logits in ((teacher, theta) if is_teacher else (theta, teacher))
        ]
        assert float(other[row]) == pytest.approx(reference.divergence(*logs), rel=1e-5)
    sizes = made.ess_teacher if is_teacher else made.ess_theta
    assert sizes.eq(1).all()


def test_temperature_acts_on_both_before_alpha_is_found() -> None:
    theta, teacher = pairs("random", 4, VOCABULARY, seed=6)
    temperatures = torch.tensor([0.5, 1.0, 0.0, 2.0])
    made = mixed(theta, teacher, temperatures)
    for row, divisor in enumerate([0.5, 1.0, 1.0, 2.0]):
        a, b = (reference.log_probabilities(logits[row].double() / divisor) for logits in (theta, teacher))
        alpha = reference.kl_symmetry(a, b)
        assert float(made.alpha[row]) == pytest.approx(alpha, abs=1e-5)
        assert torch.allclose(made.logits[row].double(), reference.mixture(a, b, alpha), atol=2e-5)


def test_a_row_does_not_depend_on_who_stands_beside_it() -> None:
    parts = [pairs(kind, 2, VOCABULARY, seed=8) for kind in KINDS]
    theta, teacher = (torch.cat(logits) for logits in zip(*parts, strict=True))
    whole = mixed(theta, teacher)
    for row in range(len(theta)):
        alone = mixed(theta[row : row + 1], teacher[row : row + 1])
        assert float(alone.alpha) == pytest.approx(float(whole.alpha[row]), abs=1e-6)
        assert torch.allclose(alone.logits[0], whole.logits[row], atol=1e-5, rtol=1e-6)


# -- bounds, masks, forced tokens ---------------------------------------------------------------------------------


def test_bounds_hold_and_are_reported() -> None:
    theta, teacher = pairs("random", 40, 50, seed=9)
    free = mixed(theta, teacher).alpha
    low, high = free.quantile(0.3).item(), free.quantile(0.7).item()
    made = mixed(theta, teacher, alpha_min=low, alpha_max=high)
    assert torch.equal(made.clamped, (free < low) | (free > high))
    assert torch.equal(made.alpha[free < low], torch.full_like(made.alpha[free < low], low))
    assert torch.equal(made.alpha[free > high], torch.full_like(made.alpha[free > high], high))
    inside = ~made.clamped
    assert torch.allclose(made.alpha[inside], free[inside])
    for row in range(10):
        check_row(made, row, theta, teacher)


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (-1, 0.8), (30, 0.9), (1, 1.0)])
def test_the_teachers_support_restricts_both_before_alpha_is_found(top_k: int, top_p: float) -> None:
    theta, teacher = pairs("random", ROWS, VOCABULARY, seed=10)
    made = mixed(theta, teacher, teacher_top_k=top_k, teacher_top_p=top_p)
    for row in range(ROWS):
        ordered = teacher[row].double().sort(descending=True)
        kept = ordered.indices[:top_k] if top_k > 0 else ordered.indices
        mass = teacher[row].double()[kept].softmax(-1).cumsum(-1)
        kept = kept[: int((mass < top_p).sum()) + 1] if top_p < 1 else kept
        assert (made.logits[row] > -math.inf).nonzero()[:, 0].tolist() == sorted(kept.tolist())
        a, b = (reference.log_probabilities(logits[row][kept]) for logits in (theta, teacher))
        alpha = float(made.alpha[row])
        assert alpha == pytest.approx(reference.kl_symmetry(a, b) if len(kept) > 1 else 0.5, abs=1e-5)
        assert torch.allclose(made.logits[row][kept].double(), reference.mixture(a, b, alpha), atol=1e-5)
        assert float(made.kl_theta[row]) == pytest.approx(-reference.log_z(a, b, alpha), abs=1e-5)


def test_the_floor_found_by_sorting_is_the_floor_found_without() -> None:
    _, teacher = pairs("random", 20, VOCABULARY, seed=11)
    teacher = (teacher * 2).round() / 2  # ties
    for top_k, top_p in ((VOCABULARY, 0.5), (VOCABULARY, 0.99), (20, 0.7), (3, 0.9999), (1, 0.2)):
        config = MixtureConfig(teacher_top_k=top_k, teacher_top_p=top_p)
        floor = mixture.support_floor(teacher, config)
        assert floor is not None
        assert torch.equal(floor, mixture.sorted_floor(teacher, top_k, top_p))


def test_the_teacher_may_have_the_first_token_and_special_ones() -> None:
    theta, teacher = pairs("random", 4, VOCABULARY, seed=12)
    teacher[1, 5] = 50.0  # a special token is its likeliest
    first = torch.tensor([True, False, False, False])

    def alphas(**options: Any) -> list[float]:
        made = mix(
            teacher,
            theta,
            MixtureConfig(alpha_max=0.9, **options),
            first=first,
            special_token_ids=torch.tensor([2, 5]),
        )
        for row in (made.alpha == 1).nonzero()[:, 0].tolist():
            assert torch.equal(made.logits[row], teacher[row])
            assert not made.clamped[row]
        return list(made.alpha.tolist())

    free = alphas()
    assert max(free) <= 0.9
    assert alphas(force_teacher_first_token=True) == [1.0, *free[1:]]
    assert alphas(force_teacher_special_tokens=True) == [free[0], 1.0, *free[2:]]


def test_no_special_tokens_at_all_force_nothing() -> None:
    theta, teacher = pairs("random", 2, 20, seed=13)
    made = mix(
        teacher,
        theta,
        MixtureConfig(force_teacher_special_tokens=True),
        first=torch.ones(2, dtype=torch.bool),
        special_token_ids=torch.tensor([], dtype=torch.long),
    )
    assert (made.alpha < 1).all()


# -- what is ruled out --------------------------------------------------------------------------------------------


def test_what_both_rule_out_is_as_if_it_were_not_there() -> None:
    theta, teacher = pairs("random", ROWS, VOCABULARY, seed=14)
    kept = torch.arange(0, VOCABULARY, 3)
    banned = torch.ones(VOCABULARY, dtype=torch.bool)
    banned[kept] = False
    made = mixed(theta.masked_fill(banned, -math.inf), teacher.masked_fill(banned, -math.inf))
    small = mixed(theta[:, kept], teacher[:, kept])
    for name in ("alpha", "log_z", "kl_theta", "kl_teacher", "ess_theta", "ess_teacher"):
        assert torch.allclose(getattr(made, name), getattr(small, name), atol=1e-6), name
    assert torch.allclose(made.logits[:, kept], small.logits, atol=1e-5)
    assert (made.logits[:, banned] == -math.inf).all()
    assert not made.disjoint.any()


@pytest.mark.parametrize("method", ["kl_symmetry", "fixed", "entropy", "ess_balance"])
def test_what_either_rules_out_is_not_drawn(method: str) -> None:
    theta, teacher = pairs("random", ROWS, VOCABULARY, seed=15)
    theta[:, :20], teacher[:, 10:30] = -math.inf, -math.inf
    made = mixed(theta, teacher, alpha_method=method, alpha=0.4 if method == "fixed" else None)
    assert (made.logits[:, :30] == -math.inf).all()
    assert made.logits[:, 30:].isfinite().all()
    for row in range(ROWS):
        a, b = (reference.log_probabilities(logits[row]) for logits in (theta, teacher))
        alpha = float(made.alpha[row])
        if method == "kl_symmetry":
            assert alpha == pytest.approx(reference.kl_symmetry(a, b), abs=1e-5)
        q = reference.mixture(a, b, alpha)
        assert torch.allclose(made.logits[row].double().exp(), q.exp(), atol=1e-6)
        assert float(made.kl_theta[row]) == pytest.approx(reference.divergence(q, a), abs=1e-5)
        assert float(made.kl_teacher[row]) == pytest.approx(reference.divergence(q, b), abs=1e-5)
    # Samples of q never visit tokens that a model holds possible: no number of them stands for that model.
    assert made.ess_theta.eq(0).all()
    assert made.ess_teacher.eq(0).all()


def test_supports_that_leave_no_minimum_stop_just_before_the_end() -> None:
    """log Z over the one common token is a line: nearly all teacher, yet nothing that the student rules out."""
    theta = torch.tensor([[0.0, -50.0, -math.inf]])
    teacher = torch.tensor([[-math.inf, 0.0, 0.0]])
    made = mixed(theta, teacher)
    assert 0 < float(made.alpha) < 1
    assert made.logits.exp().tolist() == [[0.0, 1.0, 0.0]]
    assert not made.disjoint.any()


def test_one_model_alone_may_draw_what_the_other_rules_out() -> None:
    theta, teacher = pairs("random", 2, 30, seed=16)
    theta[0, 3], teacher[1, 4] = -math.inf, -math.inf
    made = mixed(theta, teacher, alpha_method="fixed", alpha=1.0)
    assert torch.equal(made.logits, teacher)
    assert float(made.kl_theta[0]) == math.inf
    assert math.isfinite(float(made.kl_theta[1]))
    assert made.ess_theta[1] == 0, "what the student may say and the teacher never does"
    assert made.ess_theta[0] > 0
    assert made.ess_teacher.eq(1).all()
    assert made.kl_teacher.eq(0).all()


def test_disjoint_models_are_reported_and_disturb_nobody() -> None:
    theta, teacher = pairs("random", 3, 30, seed=17)
    alone = mixed(theta, teacher)
    theta[1, :15], teacher[1, 15:] = -math.inf, -math.inf
    made = mixed(theta, teacher)
    assert made.disjoint.tolist() == [False, True, False]
    assert torch.equal(made.logits[::2], alone.logits[::2])
    assert not made.logits.isnan().any()
    assert float(made.log_z[1]) == -math.inf
    fixed = mixed(theta, teacher, alpha_method="fixed", alpha=1.0)
    assert not fixed.disjoint.any(), "the teacher alone needs nobody's agreement"
    assert torch.equal(fixed.logits, teacher)


def test_a_student_whom_the_support_leaves_nothing_is_reported_where_it_decides_alone() -> None:
    theta, teacher = pairs("random", 2, 30, seed=18)
    teacher[:, 4] = 40.0
    theta[1, 4] = -math.inf
    made = mixed(theta, teacher, alpha_method="fixed", alpha=0.0, teacher_top_k=1)
    assert made.disjoint.tolist() == [False, True]
    assert made.logits[0].argmax() == 4
    assert not made.logits.isnan().any()
    assert made.log_z.tolist() == [0.0, -math.inf]


def test_nan_stays_in_its_row() -> None:
    theta, teacher = pairs("random", 4, 300, seed=18)
    alone = mixed(theta, teacher)
    theta[2, 7] = math.nan
    for config in ("kl_symmetry", "ess_balance", "entropy"):
        made = mixed(theta, teacher, alpha_method=config)
        if config == "kl_symmetry":
            for row in (0, 1, 3):
                assert torch.allclose(made.logits[row], alone.logits[row], atol=1e-5)
        assert made.logits[[0, 1, 3]].isfinite().all()


# -- no waiting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kl_symmetry", "fixed", "entropy", "ess_balance", "kl_budget"])
@pytest.mark.parametrize("support", [{}, {"teacher_top_k": 10}, {"teacher_top_p": 0.9, "teacher_top_k": 20}])
def test_no_number_is_asked_of_the_device(method: str, support: dict[str, Any]) -> None:
    """Tensors of the meta device have shapes and no numbers: who looks at one, or lets a shape depend on one, fails."""
    theta, teacher = torch.empty(3, 100, device="meta"), torch.empty(3, 100, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((theta > 0).any())
    temperatures = torch.empty(3, device="meta")
    made = mix(
        mixture.scale(teacher, temperatures),
        mixture.scale(theta, temperatures),
        MixtureConfig(
            alpha_method=method,  # type: ignore[arg-type]
            alpha=0.5 if method == "fixed" else None,
            kl_budget=0.1 if method == "kl_budget" else None,
            force_teacher_first_token=True,
            force_teacher_special_tokens=True,
            **support,
        ),
        first=torch.empty(3, dtype=torch.bool, device="meta"),
        special_token_ids=torch.empty(2, dtype=torch.long, device="meta"),
    )
    assert made.logits.shape == (3, 100)
    assert {values.shape for values in (made.alpha, made.log_z, made.kl_theta, made.ess_teacher, made.clamped)} == {
        (3,)
    }


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_method": "newton"},
        {"alpha_method": "fixed"},
        {"alpha_method": "fixed", "alpha": 1.5},
        {"alpha_method": "fixed", "alpha": True},
        {"alpha_method": "fixed", "alpha": math.nan},
        {"alpha_method": "fixed", "alpha": 0.2, "alpha_min": 0.3},
        {"alpha": 0.5},
        {"kl_budget": 0.5},
        {"alpha_method": "kl_budget"},
        {"alpha_method": "kl_budget", "kl_budget": 0.0},
        {"alpha_method": "kl_budget", "kl_budget": math.inf},
        {"alpha_method": "kl_budget", "kl_budget": 0.5, "alpha_min": 0.1},
        {"alpha_min": -0.1},
        {"alpha_max": 1.1},
        {"alpha_min": 0.8, "alpha_max": 0.2},
        {"teacher_top_k": -2},
        {"teacher_top_k": 2.0},
        {"teacher_top_p": 0.0},
        {"teacher_top_p": 1.5},
        {"force_teacher_first_token": 1},
        {"force_teacher_special_tokens": "yes"},
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"alpha|kl_budget|teacher_top|force_teacher"):
        MixtureConfig(**options)
