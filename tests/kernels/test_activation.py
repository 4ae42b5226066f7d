"""silu_and_multiply against torch's own operators, as the decoder composes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.kernels.activation import silu_and_multiply

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize(("rows", "inner"), [(1, 16), (3, 1536), (2, 1100)])
def test_silu_and_multiply(device: torch.device, dtype: torch.dtype, rows: int, inner: int) -> None:
    torch.manual_seed(inner)
    gate_up = (torch.randn(rows, 2 * inner, device=device) * 4).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty(rows, inner, dtype=dtype, device=device)
    silu_and_multiply(gate_up, out)
    torch.testing.assert_close(out, F.silu(gate) * up, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_far_gates(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, -1e30, 3.0, 3.0, 3.0, 3.0]], device=device)
    out = torch.empty(1, 4, device=device)
    silu_and_multiply(gate_up, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 600.0, 0.0, 0.0]], device=device))
