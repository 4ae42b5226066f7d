"""add_rms_norm against torch's own operators, as the decoder composes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.kernels.norm import add_rms_norm
from ramify.gpu.kernels.parts import Parts

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 576), (3, 2048)])
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_and_norm(device: torch.device, dtype: torch.dtype, rows: int, hidden: int, has_delta: bool) -> None:
    torch.manual_seed(hidden)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    delta = torch.randn(rows, hidden, device=device).to(dtype) if has_delta else None
    weight = torch.randn(hidden, device=device).to(dtype)
    summed = residual if delta is None else residual + delta
    expected = weight * F.rms_norm(summed.float(), (hidden,), eps=1e-6).to(dtype)
    out = torch.empty_like(residual)
    stream = residual.clone()
    add_rms_norm(stream, None if delta is None else Parts.whole(delta), weight, 1e-6, out)
    assert torch.equal(stream, summed)
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("has_bias", [True, False])
def test_parts_and_bias_are_added_up_and_rounded_once(device: torch.device, has_bias: bool) -> None:
    torch.manual_seed(3)
    dtype = torch.float16
    residual = torch.randn(5, 96, device=device).to(dtype)
    parts = torch.randn(7, 5, 96, device=device)
    bias = torch.randn(96, device=device).to(dtype) if has_bias else None
    delta = parts.sum(0) + (0 if bias is None else bias.float())
    stream, out = residual.clone(), torch.empty_like(residual)
    add_rms_norm(stream, Parts(parts, bias), torch.ones(96, dtype=dtype, device=device), 1e-6, out)
    torch.testing.assert_close(stream, residual + delta.to(dtype), atol=2e-3, rtol=2e-3)
    expected = F.rms_norm(stream.float(), (96,), eps=1e-6).to(dtype)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


def test_rows_of_a_wider_tensor_stay_apart(device: torch.device) -> None:
    wide = torch.randn(4, 200, device=device)
    out = torch.zeros(4, 150, device=device)
    before = wide.clone()
    add_rms_norm(wide[:, :96], None, torch.ones(96, device=device), 1e-5, out[:, :96])
    torch.testing.assert_close(out[:, :96], F.rms_norm(before[:, :96], (96,), eps=1e-5), atol=1e-5, rtol=1e-5)
    assert torch.equal(wide, before)
    assert not out[:, 96:].any()


def test_small_numbers_are_normed_by_eps(device: torch.device) -> None:
    zeros = torch.zeros(2, 64, device=device)
    out = torch.ones_like(zeros)
    add_rms_norm(zeros, None, torch.ones(64, device=device), 1e-5, out)
    assert not out.any()
