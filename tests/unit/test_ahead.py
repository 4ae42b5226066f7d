"""What is asked for ahead: from the beginning of each half of a weight or of each row, and never beyond its end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramify.gpu.kernels.ahead import Ahead


def places(ahead: Ahead) -> set[int]:
    """The first number of each stretch."""
    return {each * ahead.stride + half for each in range(ahead.count) for half in (0, ahead.to_half)}


def test_from_the_beginning_of_each_half() -> None:
    weight = torch.empty(64, 4096, dtype=torch.bfloat16)  # 512 KiB
    ahead = Ahead.of(weight, 2**16, by_row=False)
    assert ahead is not None
    assert (ahead.length, ahead.count) == (2048, 8)
    assert places(ahead) == {2048 * each + half for each in range(8) for half in (0, 32 * 4096)}


def test_from_the_beginning_of_each_row() -> None:
    weight = torch.empty(64, 4096, dtype=torch.bfloat16)
    ahead = Ahead.of(weight, 2**16, by_row=True)
    assert ahead is not None
    assert ahead.length == 512  # a kilobyte of each of 64 rows
    assert places(ahead) == {4096 * row for row in range(64)}


@pytest.mark.parametrize("weight", [torch.empty(8, 12), torch.empty(8, 10), torch.empty(7, 16), torch.empty(16, 8).t()])
def test_what_the_copy_engine_cannot_read_is_not_asked_for(weight: torch.Tensor) -> None:
    can_be_read = weight.shape == (8, 12)  # 48 bytes a row
    assert (Ahead.of(weight, 64, by_row=True) is not None) == can_be_read


@given(
    rows=st.integers(1, 300),
    lines=st.integers(1, 700),
    num_bytes=st.integers(1, 2**26),
    by_row=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int32]),
)
def test_stretches_stay_inside(rows: int, lines: int, num_bytes: int, by_row: bool, dtype: torch.dtype) -> None:
    weight = torch.empty(2 * rows, lines * 16 // dtype.itemsize, dtype=dtype)
    ahead = Ahead.of(weight, num_bytes, by_row=by_row)
    assert ahead is not None
    assert ahead.length * dtype.itemsize % 16 == ahead.stride * dtype.itemsize % 16 == 0
    assert ahead.length <= ahead.stride
    assert ahead.count * ahead.stride <= ahead.to_half + ahead.stride - ahead.length
    assert not by_row or ahead.count == rows
