"""One row's products by programs that stay, against float64: blocks that do not divide, few outputs and many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.kernels import row_stream as module
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.row_stream import RowStream, row_stream
from tests.kernels.gluon import Arriving, overlaps, prepared
from tests.kernels.test_row_product import check, normed, numbers


@pytest.fixture
def arriving(device: torch.device) -> Iterator[Arriving]:
    with prepared(device, (module, "_row_stream")) as arriving:
        yield arriving


Case = tuple[int, int, RowStream]  # outputs, columns
CASES: list[Case] = [
    (48, 64, RowStream(4, 256, 3, 1, 2)),
    (5, 1536, RowStream(8, 1024, 4, 4, 2)),
    (97, 4096, RowStream(8, 1024, 4, 4, 2)),
    (65, 896, RowStream(2, 2048, 3, 8, 1)),
    (40, 11008, RowStream(4, 1024, 5, 4, 3)),
]
if torch.cuda.is_available():  # as many blocks as programs, and many more
    CASES += [
        (3000, 4096, RowStream(8, 1024, 4, 4, 2)),
        (4097, 896, RowStream(2, 2048, 3, 8, 1)),
        (2048, 11008, RowStream(4, 1024, 5, 4, 3)),
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("extras", [("norm", "bias"), ("adds",), ("norm", "bias", "adds")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_row_stream(
    device: torch.device, dtype: torch.dtype, case: Case, extras: tuple[str, ...], arriving: Arriving
) -> None:
    outputs, columns, tiles = case
    torch.manual_seed(outputs)
    x, weight = numbers(device, dtype, 1, columns), numbers(device, dtype, outputs, columns)
    bias = numbers(device, dtype, outputs) if "bias" in extras else None
    norm = Norm(numbers(device, dtype, columns), 1e-5) if "norm" in extras else None
    wide = torch.full((1, outputs + 2), torch.nan, dtype=dtype, device=device)
    out = wide[:, 1:-1]
    adds, before = "adds" in extras, numbers(device, dtype, 1, outputs)
    out.copy_(before if adds else torch.full_like(before, torch.nan))
    with arriving(*((x, out) if adds else (x,))):
        row_stream(x, weight, out, bias=bias, norm=norm, adds=adds, tiles=tiles, overlap=overlaps(device))
    expected = (x if norm is None else normed(x, norm)).double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    check(out, expected + before.double() if adds else expected)
    assert wide[:, 0].isnan().all()
    assert wide[:, -1].isnan().all()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_gate_and_up(device: torch.device, case: Case, has_bias: bool, arriving: Arriving) -> None:
    inner, columns, tiles = case
    torch.manual_seed(inner)
    dtype = torch.bfloat16
    x = numbers(device, dtype, 1, columns)
    weight = (torch.randn(2 * inner, columns, device=device) / columns**0.5).to(dtype)
    bias = numbers(device, dtype, 2 * inner) if has_bias else None
    norm = Norm(numbers(device, dtype, columns), 1e-5)
    out = torch.full((1, inner), torch.nan, dtype=dtype, device=device)
    with arriving(x):
        row_stream(x, weight, out, bias=bias, norm=norm, tiles=tiles, is_paired=True, overlap=overlaps(device))
    both = normed(x, norm).double() @ weight.double().t() + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    check(out, F.silu(gate) * up)


@pytest.mark.usefixtures("arriving")
def test_logits_in_float32_and_what_is_not_a_number(device: torch.device) -> None:
    x, weight = numbers(device, torch.bfloat16, 1, 512), numbers(device, torch.bfloat16, 500, 512)
    weight[2, 5] = torch.nan
    out = torch.zeros(1, 500, device=device)
    row_stream(x, weight, out, tiles=RowStream(8, 512, 4, 2, 2))
    assert out.isnan().nonzero().tolist() == [[0, 2]]
    weight[2, 5] = 0
    row_stream(x, weight, out, tiles=RowStream(8, 512, 4, 2, 2))
    check(out, x.double() @ weight.double().t())
