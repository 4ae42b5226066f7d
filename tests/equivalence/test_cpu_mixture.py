"""The CPU's mixing kernel against `sampling/mixture.py`, and against float64 where that is the same."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.config import MixtureConfig
from ramify.cpu.mixer import CpuMixer
from ramify.cpu.sampler_operators import CpuOperators
from ramify.sampling import mixture as truth
from ramify.sampling.mixing import Mixer
from ramify.sampling.mixture import Mixed
from tests import mixture_reference as reference
from tests.mixture_cases import METHODS, SPECIAL, check_bounds_masks_and_the_teachers_rights, compare
from tests.mixture_reference import KINDS, pairs, worst_ratio
from tests.native import EVERY_SET, library_for, needs_compiler

pytestmark = needs_compiler

EVERY_METHOD: list[dict[str, Any]] = [*METHODS, {"alpha_method": "kl_budget", "kl_budget": 1e-5}]


def name_of(options: dict[str, Any]) -> str:
    return f"{options.get('alpha_method', 'kl_symmetry')} {options.get('kl_budget', '')}".strip()


@pytest.fixture(scope="module", params=EVERY_SET, ids=lambda instructions: instructions.name)
def operators(request: pytest.FixtureRequest) -> CpuOperators:
    return CpuOperators(library_for(request.param))


def both(operators: CpuOperators, theta: Tensor, teacher: Tensor, **options: Any) -> tuple[Mixed, Mixed]:
    """(the kernel's, torch's)."""
    config = MixtureConfig(**options)
    first = torch.zeros(len(theta), dtype=torch.bool)
    first[0] = True
    made = CpuMixer(Mixer(config, SPECIAL), operators).combine(teacher, theta, first)
    return made, truth.mix(teacher, theta, config, first=first, special_token_ids=torch.tensor(SPECIAL))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", EVERY_METHOD, ids=name_of)
def test_the_kernel_agrees_with_torch(operators: CpuOperators, kind: str, options: dict[str, Any]) -> None:
    theta, teacher = pairs(kind, 3, 4_099, seed=21)  # more than a piece, and no whole number of vectors
    made, wanted = both(operators, theta, teacher, **options)
    compare(made, wanted, theta, teacher)
    for row in range(3):
        a, b = reference.log_probabilities(theta[row]), reference.log_probabilities(teacher[row])
        alpha = float(made.alpha[row])
        if not options:
            assert abs(reference.mean_ratio(a, b, alpha)) < 1e-5 * worst_ratio(theta[row], teacher[row])
        if "kl_budget" in options:
            assert reference.divergence(reference.mixture(a, b, alpha), a) <= options["kl_budget"]


@pytest.mark.parametrize("size", [1, 3, 16, 17, 2_047, 2_048, 2_049])
@pytest.mark.parametrize("options", EVERY_METHOD, ids=name_of)
def test_rows_of_any_size_and_stride(operators: CpuOperators, size: int, options: dict[str, Any]) -> None:
    theta, teacher = pairs("random", 3, size + 5, seed=22)
    theta, teacher = theta[:, 2 : 2 + size], teacher[:, 2 : 2 + size]
    made, wanted = both(operators, theta, teacher, **options)
    compare(made, wanted, theta, teacher)


@pytest.mark.parametrize("options", EVERY_METHOD, ids=name_of)
def test_what_is_ruled_out(operators: CpuOperators, options: dict[str, Any]) -> None:
    theta, teacher = pairs("random", 7, 2_500, seed=23)
    theta[0, :20], teacher[0, :20] = -math.inf, -math.inf
    theta[1, :20], teacher[1, 10:30] = -math.inf, -math.inf
    theta[2, :600], teacher[2, 600:] = -math.inf, -math.inf  # nothing in common
    theta[3, 7] = -math.inf
    theta[4, :2_400], teacher[4, :2_400] = -math.inf, -math.inf  # a whole piece, and more
    theta[5, 1:], teacher[5, 3:] = -math.inf, -math.inf
    made, wanted = both(operators, theta, teacher, **options)
    assert made.disjoint.tolist() == [False, False, True, False, False, False, False]
    compare(made, wanted, theta, teacher)
    if made.alpha[1] > 0:  # a budget too small for what the teacher rules out leaves the student alone
        assert (made.logits[1, :30] == -math.inf).all()


def test_identical_models_meet_halfway(operators: CpuOperators) -> None:
    theta, _ = pairs("random", 2, 1_000, seed=27)
    made, _ = both(operators, theta, theta + 3.5)
    assert made.alpha.tolist() == [0.5, 0.5]
    assert torch.allclose(made.logits, theta.log_softmax(-1), atol=2e-6)
    assert (made.kl_theta < 1e-6).all()


def test_bounds_masks_and_the_teachers_rights(operators: CpuOperators) -> None:
    check_bounds_masks_and_the_teachers_rights(partial(both, operators))


@pytest.mark.parametrize(("alpha", "is_teacher"), [(0.0, False), (1.0, True)])
def test_one_model_alone_keeps_its_bits(operators: CpuOperators, alpha: float, is_teacher: bool) -> None:
    theta, teacher = pairs("random", 4, 900, seed=25)
    theta[1, 4], teacher[2, 5] = -math.inf, -math.inf
    theta[3, :400], teacher[3, 400:] = -math.inf, -math.inf
    made, wanted = both(operators, theta, teacher, alpha_method="fixed", alpha=alpha)
    assert torch.equal(made.logits, teacher if is_teacher else theta)
    for name in ("log_z", "kl_theta", "kl_teacher", "ess_theta", "ess_teacher", "disjoint"):
        assert torch.allclose(getattr(made, name).double(), getattr(wanted, name).double(), rtol=1e-3), name


def test_a_student_alone_whom_the_support_leaves_nothing(operators: CpuOperators) -> None:
    theta, teacher = pairs("random", 2, 30, seed=18)
    teacher[:, 4] = 40.0
    theta[1, 4] = -math.inf
    made, wanted = both(operators, theta, teacher, alpha_method="fixed", alpha=0.0, teacher_top_k=1)
    assert made.disjoint.tolist() == wanted.disjoint.tolist() == [False, True]
    assert made.log_z.tolist() == [0.0, -math.inf]
    assert torch.equal(made.logits, wanted.logits)


def test_nan_and_infinity_are_told_and_stay_in_their_rows(operators: CpuOperators) -> None:
    theta, teacher = pairs("random", 5, 700, seed=26)
    theta[1, 3], teacher[3, 699] = math.nan, math.inf
    made, wanted = both(operators, theta, teacher)
    assert made.sound.tolist() == wanted.sound.tolist() == [True, False, True, False, True]
    assert made.logits[::2].isfinite().all()


@pytest.mark.parametrize("options", EVERY_METHOD, ids=name_of)
def test_a_row_does_not_depend_on_the_rows_beside_it(operators: CpuOperators, options: dict[str, Any]) -> None:
    theta, teacher = pairs("peaked", 9, 5_000, seed=28)
    together, _ = both(operators, theta, teacher, **options)
    for row in range(9):
        alone, _ = both(operators, theta[row : row + 1].clone(), teacher[row : row + 1].clone(), **options)
        assert torch.equal(alone.logits[0], together.logits[row])
        assert torch.equal(alone.alpha[0], together.alpha[row])
