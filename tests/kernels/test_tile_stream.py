"""Products of several rows by programs that stay, against float64: units that do not divide, splits, any rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.kernels import tile_stream as module
from ramify.gpu.kernels.tile_stream import TileStream, stream_gate_up, tile_stream
from tests.kernels.gluon import Arriving, overlaps, prepared
from tests.kernels.test_tiled_product import check, factors


@pytest.fixture
def arriving(device: torch.device) -> Iterator[Arriving]:
    if device.type == "cuda" and not overlaps(device):
        pytest.skip("for Hopper")
    with prepared(device, (module, "_tile_stream")) as arriving:
        yield arriving


Case = tuple[int, int, int, TileStream]  # rows, outputs, columns
CASES: list[Case] = [
    (2, 64, 128, TileStream(64, 64, 3, 4, rows=16)),
    (17, 72, 112, TileStream(64, 128, 3, 4, rows=32)),
    (32, 400, 1024, TileStream(64, 128, 4, 4, rows=32, programs=2)),
    (33, 300, 1536, TileStream(128, 64, 4, 4, 2, rows=64)),
    (64, 128, 2200, TileStream(64, 128, 3, 4, 4, rows=64, programs=2)),
    (64, 640, 512, TileStream(128, 128, 3, 8, rows=64)),
    (100, 200, 896, TileStream(64, 64, 6, 4, 3, rows=128)),
]
if torch.cuda.is_available():  # as many units as programs, and many more
    CASES += [
        (32, 6144, 4096, TileStream(64, 128, 4, 4, rows=32, programs=2)),
        (33, 3000, 1536, TileStream(128, 64, 4, 4, 2, rows=64)),
        (64, 1024, 11008, TileStream(64, 128, 3, 4, 4, rows=64, programs=2)),
        (64, 10240, 512, TileStream(128, 128, 3, 8, rows=64)),
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tile_stream(device: torch.device, dtype: torch.dtype, case: Case, arriving: Arriving) -> None:
    rows, outputs, columns, tiles = case
    x, weight = factors(device, dtype, rows, outputs, columns)
    parts = torch.full((tiles.splits, rows, outputs), torch.nan, device=device)
    with arriving(x):
        tile_stream(x, weight, parts, tiles, overlap=True)
    check(parts.sum(0), x.double() @ weight.double().t())
    if tiles.splits == 1:
        bias = torch.randn(outputs, device=device).to(dtype)
        rounded = torch.full((1, rows, outputs), torch.nan, dtype=dtype, device=device)
        tile_stream(x, weight, rounded, tiles, bias=bias)
        check(rounded[0], x.double() @ weight.double().t() + bias.double())


@pytest.mark.parametrize("case", [case for case in CASES if case[3].splits == 1], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up(device: torch.device, case: Case, has_bias: bool, arriving: Arriving) -> None:
    rows, inner, columns, tiles = case
    if tiles.shared_memory(rows, 2, num_weights=2) > 227 * 1024:
        pytest.skip("more than shared memory holds")
    dtype = torch.bfloat16
    x, weight = factors(device, dtype, rows, 2 * inner, columns)
    bias = torch.randn(2 * inner, device=device).to(dtype) if has_bias else None
    out = torch.full((rows, inner), torch.nan, dtype=dtype, device=device)
    with arriving(x):
        stream_gate_up(x, weight, out, tiles, bias=bias, overlap=True)
    both = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    check(out, F.silu(gate) * up)


@pytest.mark.usefixtures("arriving")
def test_nothing_that_is_not_a_number_reaches_a_neighbour(device: torch.device) -> None:
    x, weight = factors(device, torch.bfloat16, 20, 200, 512)
    x[3] = torch.nan
    parts = torch.zeros(2, 20, 200, device=device)
    tile_stream(x, weight, parts, TileStream(64, 64, 4, 4, 2, rows=32))
    assert parts.isnan().all(2).all(0).nonzero().flatten().tolist() == [3]
    assert not parts[:, torch.arange(20) != 3].isnan().any()
