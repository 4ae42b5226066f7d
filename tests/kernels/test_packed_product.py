"""Products with weights of few bits against the dequantised weight in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ramify.gpu.kernels.packed_product import packed_product
from ramify.gpu.kernels.tiled_product import Tiles
from ramify.gpu.packed_parts import DevicePacking, PackedPart
from ramify.models.packed_quants import PACKED_FORMATS
from tests.kernels.test_tiled_product import check
from tests.quantised import stored


def packed(name: str, outputs: int, columns: int, device: torch.device, dtype: torch.dtype) -> PackedPart:
    part = DevicePacking(device, dtype).pack(stored(name, outputs, columns, seed=outputs))
    assert isinstance(part, PackedPart)
    return part


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_rows_are_those_of_the_blocks(name: str, device: torch.device) -> None:
    """In the order of the weight's own columns, whatever order they are held in."""
    weight = stored(name, 20, 256, seed=1)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ids = torch.tensor([19, 0, 7, 7], device=device)
    for each in (weight, replace(weight, order=order)):
        part = DevicePacking(device, torch.float16).pack(each)
        assert torch.equal(part.rows(ids).cpu(), each.numbers()[ids.cpu()])


@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.parametrize(
    ("rows", "outputs", "tiles"),
    [
        (1, 40, Tiles(16, 0, 2, 4)),
        (3, 64, Tiles(32, 0, 2, 4, splits=2)),
        (64, 33, Tiles(32, 0, 2, 4, splits=4)),  # more splits than blocks of 128
        (70, 40, Tiles(32, 0, 2, 4, rows=32)),
    ],
)
def test_packed_product(
    device: torch.device, dtype: torch.dtype, name: str, rows: int, outputs: int, tiles: Tiles
) -> None:
    """Float16 is exact up to the sum: numbers, zeros and scales are never rounded."""
    columns = 128 if rows == 1 else 256
    part = packed(name, outputs, columns, device, dtype)
    x = torch.randn(rows, columns, device=device).to(dtype)
    weight = part.rows(torch.arange(outputs, device=device)).double()
    values = torch.full((tiles.splits, rows, outputs + 7), torch.nan, device=device)
    packed_product(x, part, values, tiles, first_output=3)
    check(values.sum(0)[:, 3:-4], x.double() @ weight.t())
    assert values[:, :, :3].isnan().all()
    assert values[:, :, -4:].isnan().all()


def test_a_bias_and_a_narrow_output(device: torch.device, dtype: torch.dtype) -> None:
    part = packed("INT4x32", 24, 64, device, dtype)
    x, bias = torch.randn(5, 64, device=device).to(dtype), torch.randn(24, device=device).to(dtype)
    out = torch.empty(1, 5, 24, device=device, dtype=dtype)
    packed_product(x, part, out, Tiles(16, 0, 2, 4), bias=bias)
    weight = part.rows(torch.arange(24, device=device)).double()
    check(out[0], x.double() @ weight.t() + bias.double())
