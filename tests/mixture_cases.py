"""What every way to mix two models must do as `sampling/mixture.py` does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.sampling.mixture import Mixed
from tests.mixture_reference import check_row, log_probabilities, pairs

METHODS: list[dict[str, Any]] = [
    {},
    {"alpha_method": "fixed", "alpha": 0.3},
    {"alpha_method": "entropy"},
    {"alpha_method": "ess_balance"},
    {"alpha_method": "kl_budget", "kl_budget": 0.1},
]
SPECIAL = [2, 5]  # token ids
Both = Callable[..., tuple[Mixed, Mixed]]  # theta, teacher, options of MixtureConfig: the kernels', and torch's


def compare(made: Mixed, wanted: Mixed, theta: Tensor, teacher: Tensor) -> None:
    """Two ways to mix the same rows."""
    for name in ("clamped", "disjoint", "sound"):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    for row in range(len(theta)):
        if made.disjoint[row]:
            continue
        check_row(made, row, theta, teacher)
        a, b = log_probabilities(theta[row]), log_probabilities(teacher[row])
        spread = min(1.0, float((b - a)[(a > -math.inf) & (b > -math.inf)].abs().max()))
        # Where the models nearly agree, α is all but free: q is the same to the last digit.
        loose = 2e-6 / max(spread, 1e-3) ** 2
        assert float(made.alpha[row]) == pytest.approx(float(wanted.alpha[row]), abs=min(max(2e-6, loose), 2e-2))
        for name in ("normaliser_theta", "normaliser_teacher"):
            assert float(getattr(made, name)[row]) == pytest.approx(float(getattr(wanted, name)[row]), abs=1e-5), name


def check_bounds_masks_and_the_teachers_rights(both: Both) -> None:
    theta, teacher = pairs("random", 6, 300, seed=24)
    teacher[3, SPECIAL[1]] = 60.0
    choices: list[dict[str, Any]] = [
        {"alpha_min": 0.49, "alpha_max": 0.51},
        {"alpha_method": "fixed", "alpha": 0.3, "alpha_min": 0.3, "alpha_max": 0.3},
        {"force_teacher_first_token": True, "alpha_max": 0.4},
        {"force_teacher_special_tokens": True},
        {"teacher_top_k": 12},
        {"teacher_top_p": 0.7},
    ]
    for options in choices:
        made, wanted = both(theta, teacher, **options)
        assert torch.equal(made.clamped, wanted.clamped)
        assert torch.allclose(made.alpha, wanted.alpha, atol=3e-6)
        assert torch.equal(made.logits == -torch.inf, wanted.logits == -torch.inf)
        assert torch.allclose(made.logits.exp(), wanted.logits.exp(), atol=3e-6)
