"""Every form of a product gives the same numbers, whatever the machine would choose by itself."""

from __future__ import annotations

import pytest
import torch

from ramify.models import linear
from ramify.models.linear import Linear, may_pack

FORMS = {
    "linear": linear._Forms(),
    "halves": linear._Forms(halves=range(1, 2)),
    "packed": linear._Forms(packed=range(1, 1000)),
    "transposed": linear._Forms(transposed=range(1, 1000)),
}


def filled(rows: int = 96, columns: int = 64, *, bias: bool = False) -> Linear:
    layer = Linear.empty(rows, columns, bias=bias, dtype=torch.float32, device=torch.device("cpu"))
    layer.weight.normal_(generator=torch.Generator().manual_seed(1))
    if layer.bias is not None:
        layer.bias.normal_(generator=torch.Generator().manual_seed(2))
    layer.may_pack = may_pack(layer.weight, layer.weight.nbytes)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 130])
@pytest.mark.parametrize("form", FORMS)
def test_forms_agree(monkeypatch: pytest.MonkeyPatch, form: str, count: int, bias: bool) -> None:
    monkeypatch.setattr(linear, "_forms", lambda: FORMS[form])
    layer = filled(bias=bias)
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(3))
    exact = x.double() @ layer.weight.double().t()
    if layer.bias is not None:
        exact += layer.bias.double()
    for given in (x, x.t().contiguous().t()):  # rows in one piece, and the view that a transposed product leaves
        with torch.inference_mode():
            assert torch.allclose(layer.product(given).double(), exact, atol=2e-5)


def test_a_packed_copy_follows_weights_loaded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_forms", lambda: FORMS["packed"])
    layer, x = filled(), torch.randn(5, 64)
    before = layer.product(x)
    with torch.inference_mode():  # as weights are filled, a part of a packed tensor at a time
        layer.weight[:32].copy_(torch.ones(32, 64))
    after = layer.product(x)
    assert torch.allclose(after[:, :32], x.sum(1, keepdim=True).expand(5, 32), atol=2e-5)
    assert torch.equal(after[:, 32:], before[:, 32:])


def test_large_models_and_other_types_are_not_kept_twice() -> None:
    weight = torch.empty(4, 4)
    assert may_pack(weight, weight.nbytes) == torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    assert not may_pack(weight, 2**60)
    assert not may_pack(weight.bfloat16(), weight.nbytes)
    with torch.inference_mode():
        assert not may_pack(torch.empty(4, 4), 64)
