"""The GPU's mixer against `sampling/mixture.py`, and against float64 where that is the same."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.config import MixtureConfig
from ramify.gpu import mixer as kernel
from ramify.sampling import mixture as truth
from ramify.sampling.mixture import Mixed
from tests import mixture_reference as reference
from tests.mixture_cases import METHODS, SPECIAL, check_bounds_masks_and_the_teachers_rights, compare
from tests.mixture_reference import KINDS, pairs, worst_ratio


def both(theta: Tensor, teacher: Tensor, device: torch.device, **options: Any) -> tuple[Mixed, Mixed]:
    """(the kernels', torch's on the CPU), both on the CPU."""
    config = MixtureConfig(**options)
    first = torch.zeros(len(theta), dtype=torch.bool)
    first[0] = True
    special = torch.tensor(SPECIAL)
    made = kernel.mix(
        teacher.to(device), theta.to(device), config, first=first.to(device), special_token_ids=special.to(device)
    )
    on_cpu = Mixed(*(getattr(made, field.name).cpu() for field in fields(Mixed)))
    return on_cpu, truth.mix(teacher, theta, config, first=first, special_token_ids=special)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", METHODS, ids=lambda options: options.get("alpha_method", "kl_symmetry"))
def test_kernels_agree_with_torch(kind: str, options: dict[str, Any], device: torch.device) -> None:
    theta, teacher = pairs(kind, 3, 1500, seed=21)
    made, wanted = both(theta, teacher, device, **options)
    compare(made, wanted, theta, teacher)
    if not options:
        for row in range(3):
            a, b = reference.log_probabilities(theta[row]), reference.log_probabilities(teacher[row])
            alpha = float(made.alpha[row])
            assert abs(reference.mean_ratio(a, b, alpha)) < 1e-5 * worst_ratio(theta[row], teacher[row])


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options.get("alpha_method", "kl_symmetry"))
def test_rows_longer_than_a_split_and_of_any_stride(options: dict[str, Any], device: torch.device) -> None:
    theta, teacher = pairs("random", 2, 3 * kernel.SPLIT + 77, seed=22)
    theta, teacher = theta[:, :-70], teacher[:, :-70]
    made, wanted = both(theta, teacher, device, **options)
    compare(made, wanted, theta, teacher)


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options.get("alpha_method", "kl_symmetry"))
def test_what_is_ruled_out(options: dict[str, Any], device: torch.device) -> None:
    theta, teacher = pairs("random", 5, 1200, seed=23)
    theta[0, :20], teacher[0, :20] = -math.inf, -math.inf
    theta[1, :20], teacher[1, 10:30] = -math.inf, -math.inf
    theta[2, :600], teacher[2, 600:] = -math.inf, -math.inf  # nothing in common
    theta[3, 7] = -math.inf
    made, wanted = both(theta, teacher, device, **options)
    assert made.disjoint.tolist() == [False, False, True, False, False]
    compare(made, wanted, theta, teacher)
    assert (made.logits[1, :30] == -math.inf).all()


def test_bounds_masks_and_the_teachers_rights(device: torch.device) -> None:
    check_bounds_masks_and_the_teachers_rights(
        lambda theta, teacher, **options: both(theta, teacher, device, **options),
    )


@pytest.mark.parametrize(("alpha", "is_teacher"), [(0.0, False), (1.0, True)])
def test_one_model_alone_keeps_its_bits(alpha: float, is_teacher: bool, device: torch.device) -> None:
    theta, teacher = pairs("random", 3, 900, seed=25)
    theta[1, 4], teacher[2, 5] = -math.inf, -math.inf
    made, wanted = both(theta, teacher, device, alpha_method="fixed", alpha=alpha)
    assert torch.equal(made.logits, teacher if is_teacher else theta)
    for name in ("log_z", "kl_theta", "kl_teacher", "ess_theta", "ess_teacher"):
        assert torch.allclose(getattr(made, name), getattr(wanted, name), rtol=1e-3), name


def test_a_student_whom_the_support_leaves_nothing_decides_nothing(device: torch.device) -> None:
    theta, teacher = pairs("random", 3, 300, seed=31)
    teacher[:, 7] = 40.0
    theta[1, 7] = -math.inf
    made, wanted = both(theta, teacher, device, alpha_method="fixed", alpha=0.0, teacher_top_k=1)
    assert made.disjoint.tolist() == wanted.disjoint.tolist() == [False, True, False]
    assert made.log_z.tolist() == wanted.log_z.tolist() == [0.0, -math.inf, 0.0]
    assert torch.equal(made.logits, wanted.logits)


def test_nan_is_told_and_stays_in_its_row(device: torch.device) -> None:
    theta, teacher = pairs("random", 3, 700, seed=26)
    theta[1, 3] = math.nan
    made, _ = both(theta, teacher, device)
    assert made.sound.tolist() == [True, False, True]
    assert made.logits[::2].isfinite().all()
