"""Codes of arithmetic sampling: which token they fall into, at the ends too, and what is left of them."""

from __future__ import annotations

import math

import pytest
import torch

from ramify.sampling.arithmetic import LARGEST_CODE, Code, read

LOGITS = torch.full((6,), -math.inf)
LOGITS[[1, 3, 4]] = torch.tensor([0.1, 0.6, 0.3]).log()


@pytest.mark.parametrize(
    ("value", "token", "inside"),
    [(0.0, 1, 0.0), (0.05, 1, 0.5), (0.1001, 3, 0.0001 / 0.6), (0.4, 3, 0.5), (0.85, 4, 0.5), (LARGEST_CODE, 4, 1.0)],
)
def test_a_code_falls_into_a_token_that_can_be_drawn(value: float, token: int, inside: float) -> None:
    [found], [following] = read(LOGITS[None], [Code(value, 2.0**-32)])
    assert found == token
    assert following.value == pytest.approx(inside, abs=1e-6)
    assert following.value < 1
    assert following.step == pytest.approx(2.0**-32 / float(LOGITS[token].exp()), rel=1e-6)


def test_rows_are_read_together_as_alone() -> None:
    """A row whose last tokens cannot be drawn among others: whatever is done for it changes no neighbour."""
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)) * 3
    rows[1, 200:] = -math.inf
    rows[3, :] = -math.inf
    rows[3, 150] = 0.0
    codes = [Code(value, 2.0**-32) for value in (0.3, LARGEST_CODE, LARGEST_CODE, LARGEST_CODE, 0.0)]
    tokens, following = read(rows, codes)
    for row, code in enumerate(codes):
        assert read(rows[row : row + 1], [code]) == ([tokens[row]], [following[row]])
        assert rows[row, tokens[row]] > -math.inf
    assert tokens[3] == 150
