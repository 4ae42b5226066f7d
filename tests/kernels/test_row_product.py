"""One row's products against float64, with everything that is done on the way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels.row_product import Norm, RowTiles, row_gate_up, row_product

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TILES = RowTiles(4, 64, 1)
# Outputs, columns and tiles, also such as divide neither. Each is a compilation of its own on a GPU, so not all pairs.
CASES = [
    (48, 64, TILES),
    (5, 16, TILES),
    (33, 112, TILES),
    (7, 200, RowTiles(2, 128, 2)),
    (33, 112, RowTiles(8, 32, 1, 3)),
    (48, 256, RowTiles(8, 32, 1, 3)),
]


def numbers(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def normed(x: Tensor, norm: Norm) -> Tensor:
    return norm.weight * F.rms_norm(x.float(), x.shape[1:], eps=norm.eps).to(x.dtype)


def check(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double() / scale, expected / scale, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("outputs", "columns", "tiles"), CASES, ids=str)
@pytest.mark.parametrize(
    ("has_norm", "has_bias", "adds"), [(True, True, False), (False, False, True), (True, True, True)]
)
def test_row_product(
    device: torch.device,
    dtype: torch.dtype,
    tiles: RowTiles,
    outputs: int,
    columns: int,
    has_norm: bool,
    has_bias: bool,
    adds: bool,
) -> None:
    torch.manual_seed(outputs)
    x, weight = numbers(device, dtype, 1, columns), numbers(device, dtype, outputs, columns)
    bias = numbers(device, dtype, outputs) if has_bias else None
    norm = Norm(numbers(device, dtype, columns), 1e-5) if has_norm else None
    wide = torch.full((1, outputs + 2), torch.nan, dtype=dtype, device=device)
    out = wide[:, 1:-1]
    before = numbers(device, dtype, 1, outputs)
    out.copy_(before if adds else torch.full_like(before, torch.nan))
    row_product(x, weight, out, bias=bias, norm=norm, adds=adds, tiles=tiles)
    expected = (x if norm is None else normed(x, norm)).double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    check(out, expected + before.double() if adds else expected)
    assert wide[:, 0].isnan().all()
    assert wide[:, -1].isnan().all()


def test_a_product_may_be_written_in_float32(device: torch.device) -> None:
    x, weight = numbers(device, torch.float16, 1, 96), numbers(device, torch.float16, 50, 96)
    out = torch.full((1, 50), torch.nan, device=device)
    row_product(x, weight, out, tiles=TILES)
    check(out, x.double() @ weight.double().t())


@pytest.mark.parametrize(("inner", "columns", "tiles"), CASES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_row_gate_up(
    device: torch.device, dtype: torch.dtype, tiles: RowTiles, inner: int, columns: int, has_bias: bool
) -> None:
    torch.manual_seed(inner)
    x = numbers(device, dtype, 1, columns)
    weight = (torch.randn(2 * inner, columns, device=device) / columns**0.5).to(dtype)
    bias = numbers(device, dtype, 2 * inner) if has_bias else None
    norm = Norm(numbers(device, dtype, columns), 1e-5)
    out = torch.full((1, inner), torch.nan, dtype=dtype, device=device)
    row_gate_up(x, weight, out, bias=bias, norm=norm, tiles=tiles)
    both = normed(x, norm).double() @ weight.double().t() + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    check(out, F.silu(gate) * up)


def test_not_a_number_stays_visible(device: torch.device) -> None:
    x, weight = torch.randn(1, 64, device=device), torch.randn(6, 64, device=device)
    weight[2, 5] = torch.nan
    out = torch.zeros(1, 6, device=device)
    row_product(x, weight, out, tiles=TILES)
    assert out.isnan().tolist() == [[False, False, True, False, False, False]]
