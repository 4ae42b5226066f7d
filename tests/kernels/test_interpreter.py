"""The quickened interpreter computes what Triton's own does."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from triton import language as tl

from ramify.config import MixtureConfig
from ramify.gpu.mixer import mix
from ramify.sampling.mixture import Mixed
from tests.kernels.interpreter import quick_interpreter
from tests.mixture_reference import pairs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")


def numbers() -> list[torch.Tensor]:
    """Of kernels with loops, branches, reductions, and functions that call functions."""
    theta, teacher = pairs("random", 2, 90, seed=1)
    mixed = mix(
        teacher, theta, MixtureConfig(), first=torch.zeros(2, dtype=torch.bool), special_token_ids=torch.tensor([2])
    )
    return [getattr(mixed, field.name) for field in fields(Mixed)]


@pytest.fixture(autouse=True, scope="module")
def kernels_are_interpreted_quickly() -> None:
    """Not here, but where a test says so."""


def test_the_same_numbers_to_the_bit_and_the_language_as_it_was() -> None:
    plain, language = numbers(), dict(vars(tl.core))
    with quick_interpreter():
        quick = numbers()
    assert all(torch.equal(one, other) for one, other in zip(plain, quick, strict=True))
    assert dict(vars(tl.core)) == language
    assert tl.block_type(tl.float32, [4]).shape == tl.tuple([4])
