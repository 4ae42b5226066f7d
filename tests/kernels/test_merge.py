"""Merging parts against softmax weights in float64."""

from __future__ import annotations

import pytest
import torch

from ramify.gpu.kernels.merge import merge
from tests.kernels.scene import TOLERANCE

HEADS = 3


def random_parts(count: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    partials = torch.randn(count, HEADS, head_dim, generator=generator)
    lse = 4 * torch.randn(count, HEADS, generator=generator)
    return partials.to(device), lse.to(device)


def numbers(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_any_number_of_parts(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    counts = [1, 2, 0, 7, 8, 9, 23, 0]  # around the number merged at a time; 0 is padding
    firsts = [sum(counts[:row]) for row in range(len(counts))]
    partials, lse = random_parts(sum(counts), head_dim, device)
    out = torch.full((len(counts), HEADS * head_dim), torch.nan, dtype=dtype, device=device)
    merge(partials, lse, numbers(firsts, device), numbers(counts, device), out)
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        weights = lse[first : first + count].cpu().double().softmax(0)
        expected = (weights[..., None] * partials[first : first + count].cpu().double()).sum(0).flatten()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[row].cpu().double(), expected, atol=tolerance, rtol=tolerance)


def test_one_part_is_taken_as_it_is(device: torch.device) -> None:
    partials, lse = random_parts(1, 32, device)
    out = torch.empty(1, HEADS * 32, device=device)
    merge(partials, lse, numbers([0], device), numbers([1], device), out)
    assert torch.equal(out[0], partials[0].flatten())


def test_parts_that_saw_nothing_weigh_nothing(device: torch.device) -> None:
    partials, lse = random_parts(21, 32, device)
    empty = torch.ones(21, dtype=torch.bool, device=device)
    empty[[10, 12, 20]] = False  # the whole first tile of eight saw nothing
    partials[empty], lse[empty] = torch.nan, -torch.inf
    out = torch.empty(2, HEADS * 32, device=device)
    merge(partials, lse, numbers([0, 0], device), numbers([21, 9], device), out)
    weights = lse[~empty].double().softmax(0)
    expected = (weights[..., None] * partials[~empty].double()).sum(0).flatten()
    torch.testing.assert_close(out[0].double(), expected, atol=1e-5, rtol=1e-5)
    assert (out[1] == 0).all(), "a row none of whose parts saw anything"


def test_nan_stays_visible(device: torch.device) -> None:
    partials, lse = random_parts(3, 32, device)
    partials[1], lse[1] = torch.nan, torch.nan
    out = torch.empty(2, HEADS * 32, device=device)
    merge(partials, lse, numbers([0, 2], device), numbers([2, 1], device), out)
    assert out.isnan().all(1).tolist() == [True, False]


def test_far_apart_scores_do_not_overflow(device: torch.device) -> None:
    partials, lse = random_parts(2, 32, device)
    lse[0], lse[1] = -3e4, 3e4
    out = torch.empty(1, HEADS * 32, device=device)
    merge(partials, lse, numbers([0], device), numbers([2], device), out)
    assert torch.equal(out[0], partials[1].flatten())


def test_rows_of_the_output_may_be_a_slice_of_something_wider(device: torch.device) -> None:
    partials, lse = random_parts(2, 32, device)
    wide = torch.full((2, 200), 7.0, device=device)
    merge(partials, lse, numbers([0, 1], device), numbers([1, 1], device), wide[:, : HEADS * 32])
    assert torch.equal(wide[:, : HEADS * 32], partials.flatten(1))
    assert (wide[:, HEADS * 32 :] == 7).all()
