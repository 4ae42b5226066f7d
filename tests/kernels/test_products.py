"""A weight in every form: the same product, whoever chose it; and what is timed launches every candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.kernels.row_product import Norm, RowTiles
from ramify.gpu.kernels.tiled_product import Tiles
from ramify.gpu.product_candidates import Chip, candidates
from ramify.gpu.product_forms import Form, OneForm, Product, Role, Vendor
from ramify.gpu.products import DenseWeight, Stream, trial_of
from ramify.models.linear import Linear

TILES = Tiles(32, 32, 2, 4)
FORMS = {1: [RowTiles(2, 64, 1), TILES, Vendor()], 70: [TILES, replace(TILES, splits=2, rows=16), Vendor()]}
CASES = [(rows, form) for rows, forms in FORMS.items() for form in forms]


@pytest.mark.parametrize(("rows", "form"), CASES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_every_form_is_the_same_product(device: torch.device, rows: int, form: Form, has_bias: bool) -> None:
    torch.manual_seed(rows)
    columns, outputs = 80, 48
    bias = torch.randn(outputs, device=device) if has_bias else None
    linear = Linear(torch.randn(outputs, columns, device=device) / columns**0.5, bias)
    weight = DenseWeight(linear, OneForm(form))
    x, values = torch.randn(rows, columns, device=device), torch.randn(rows, outputs, device=device)
    norm, after = (Norm(torch.rand(width, device=device) + 0.5, 1e-6) for width in (columns, outputs))
    whole = F.linear(x.double(), linear.weight.double(), None if bias is None else bias.double())

    added = Stream(values.clone())
    weight.into_stream(x, added)
    added.normed(after)
    torch.testing.assert_close(added.values, (values.double() + whole).float(), atol=1e-4, rtol=1e-4)

    normed = F.rms_norm(x.double(), (columns,), norm.weight.double(), norm.eps)
    from_norm = F.linear(normed, linear.weight.double(), None if bias is None else bias.double())
    parts = weight.from_stream(Stream(x.clone()), norm)
    total = parts.values.double().sum(0) + (0 if parts.bias is None else parts.bias.double())
    torch.testing.assert_close(total, from_norm, atol=1e-4, rtol=1e-4)

    if not isinstance(form, Tiles) or form.splits == 1:
        gated = x.new_full((rows, outputs // 2), torch.nan)
        weight.gated_from_stream(Stream(x.clone()), norm, gated)
        gate, up = from_norm.chunk(2, dim=-1)
        torch.testing.assert_close(gated, (F.silu(gate) * up).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("role", ["read", "added", "gate_up", "head"])
def test_a_trial_launches_every_candidate(device: torch.device, role: Role, rows: int) -> None:
    """Where it is timed all of them are launched first, as here."""
    linears = [Linear(torch.randn(96, 96, device=device, dtype=torch.float16)) for _ in range(2)]
    product = Product(role, 96, 96, torch.float16)
    launch = trial_of(product, linears, rows)
    likely = candidates(product, rows, Chip(processors=132, shared_memory=227 * 1024))
    assert len(likely) > 1
    for form in likely:
        launch(form)
