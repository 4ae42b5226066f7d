"""Products of a batch-invariant weight: right, and a row's bits the same with any number of rows beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu import invariant_products
from ramify.gpu.invariant_products import InvariantWeight, splits_of
from ramify.gpu.kernels.folded_product import folded_product
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.tiled_product import Tiles, tiled_product
from ramify.gpu.products import Stream
from ramify.models.linear import Linear

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ON_GPU = torch.cuda.is_available()
COLUMNS = 1024 if ON_GPU else 256
OUTPUTS = 1000 if ON_GPU else 72
ROWS = 700 if ON_GPU else 70


@pytest.fixture
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that columns are split, and many rows are folded, at sizes for the interpreter."""
    monkeypatch.setattr(invariant_products, "PROCESSORS", 40 if ON_GPU else 4)


def linear(dtype: torch.dtype, device: torch.device) -> Linear:
    torch.manual_seed(0)
    weight = torch.randn(OUTPUTS, COLUMNS) / COLUMNS**0.5
    return Linear(weight.to(device, dtype), torch.randn(OUTPUTS).to(device, dtype))


def products(weight: InvariantWeight, x: Tensor) -> dict[str, Tensor]:
    norm = Norm(torch.ones_like(x[0]), 1e-6)
    parts = weight.from_stream(Stream(x.clone()), norm)
    whole = parts.values[0].float()
    for part in parts.values[1:]:
        whole = whole + part.float()
    if parts.bias is not None:
        whole = whole + parts.bias.float()
    gated = x.new_empty(len(x), OUTPUTS // 2)
    weight.gated_from_stream(Stream(x.clone()), norm, gated)
    logits = torch.empty(len(x), OUTPUTS, device=x.device)
    weight.logits(x, logits)
    return {"product": whole.to(x.dtype), "gated": gated, "logits": logits}


@pytest.mark.usefixtures("few_processors")
def test_a_rows_products_in_any_company(dtype: torch.dtype, device: torch.device) -> None:
    lin = linear(dtype, device)
    weight = InvariantWeight(lin)
    assert splits_of(OUTPUTS, COLUMNS) > 1
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    together = products(weight, x)
    assert lin.bias is not None
    w, bias = lin.weight.double(), lin.bias.double()
    normed = (x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype).double()
    gate, up = (normed @ w.t() + bias).chunk(2, -1)
    expected = {"product": normed @ w.t() + bias, "gated": F.silu(gate) * up, "logits": x.double() @ w.t()}
    for name, truth in expected.items():
        torch.testing.assert_close(together[name].double(), truth, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])
    for rows in (slice(0, 1), slice(5, 8), slice(ROWS - 33, ROWS)):
        for name, product in products(weight, x[rows]).items():
            assert torch.equal(product, together[name][rows]), f"{name} of rows {rows}"


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_folded_sums_are_those_of_parts(splits: int, dtype: torch.dtype, device: torch.device) -> None:
    lin = linear(dtype, device)
    assert lin.bias is not None
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    tiles = Tiles(outputs=64, columns=64, stages=2, warps=4, splits=splits, rows=32)
    parts = torch.empty(splits, 40, OUTPUTS, device=device)
    tiled_product(x, lin.weight, parts, tiles)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    out = torch.full((40, OUTPUTS), torch.nan, dtype=dtype, device=device)
    folded_product(x, lin.weight, out, tiles, bias=lin.bias)
    assert torch.equal(out, (whole + lin.bias.float()).to(dtype))
