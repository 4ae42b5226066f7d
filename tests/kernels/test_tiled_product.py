"""Products in tiles, whoever brings these, against float64: any shape and cut, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels.copied_product import copied_gate_up, copied_product
from ramify.gpu.kernels.tiled_product import Tiles, tiled_gate_up, tiled_product
from ramify.gpu.product_forms import LEAST_SHARED_MEMORY, FormsByRule, Product, Role, tiles_for

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

PRODUCTS = pytest.mark.parametrize("multiply", [tiled_product, copied_product])
GATE_UPS = pytest.mark.parametrize("multiply", [tiled_gate_up, copied_gate_up])
Multiply = Callable[..., None]


def check(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double() / scale, expected / scale, atol=tolerance, rtol=tolerance)


def factors(device: torch.device, dtype: torch.dtype, rows: int, outputs: int, columns: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, columns, device=device).to(dtype)
    return x, (torch.randn(outputs, columns, device=device) / columns**0.5).to(dtype)


@PRODUCTS
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "tiles"),
    [
        (2, 64, 128, Tiles(32, 64, 2, 4)),
        (64, 64, 128, Tiles(32, 64, 2, 4)),
        (2, 72, 112, Tiles(32, 32, 2, 4)),  # no tile divides either
        (17, 72, 112, Tiles(32, 32, 2, 4)),
        (16, 40, 320, Tiles(16, 64, 2, 4, splits=2)),  # splits of 3 and 2 tiles
        (33, 40, 320, Tiles(16, 64, 2, 4, splits=2)),
        (17, 33, 208, Tiles(32, 64, 2, 4, splits=4)),  # the last one shorter than a tile
        (16, 16, 64, Tiles(16, 64, 2, 4, splits=4)),  # splits with nothing to do
        (1, 40, 112, Tiles(32, 64, 2, 4)),
        (65, 40, 112, Tiles(32, 64, 2, 4)),  # one tile of 128 rows
        (100, 40, 320, Tiles(16, 64, 2, 4, splits=2, rows=16)),  # seven tiles of 16
        (256, 40, 112, Tiles(32, 64, 2, 4)),
        (300, 40, 112, Tiles(32, 64, 2, 4, splits=2)),  # two tiles of 256, the second mostly empty
        (1000, 72, 112, Tiles(32, 64, 2, 4, rows=64)),  # 16 tiles: two groups
        (1100, 40, 64, Tiles(32, 64, 2, 4, rows=128)),  # 9 tiles: a group, and one more
    ],
)
def test_tiled_product(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    columns: int,
    tiles: Tiles,
    multiply: Multiply,
) -> None:
    x, weight = factors(device, dtype, rows, outputs, columns)
    parts = torch.full((tiles.splits, rows, outputs), torch.nan, device=device)
    multiply(x, weight, parts, tiles)
    check(parts.sum(0), x.double() @ weight.double().t())


@GATE_UPS
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "has_bias"),
    [
        (1, 50, 112, True),
        (2, 64, 128, True),
        (16, 50, 112, False),
        (17, 50, 112, True),
        (64, 64, 128, False),
        (33, 50, 112, False),
        (100, 50, 112, True),
        (300, 50, 64, False),
        (1000, 50, 64, True),
    ],
)
def test_tiled_gate_up(
    device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int, has_bias: bool, multiply: Multiply
) -> None:
    x, weight = factors(device, dtype, rows, 2 * inner, columns)
    bias = torch.randn(2 * inner, device=device).to(dtype) if has_bias else None
    out = torch.full((rows, inner), torch.nan, dtype=dtype, device=device)
    multiply(x, weight, out, Tiles(32, 64, 2, 4), bias=bias)
    both = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    check(out, F.silu(gate) * up)


@PRODUCTS
def test_one_part_may_be_rounded_with_its_bias_in_it(
    device: torch.device, dtype: torch.dtype, multiply: Multiply
) -> None:
    x, weight = factors(device, dtype, 100, 40, 96)
    bias = torch.randn(40, device=device).to(dtype)
    parts = torch.full((1, 100, 40), torch.nan, dtype=dtype, device=device)
    multiply(x, weight, parts, Tiles(16, 32, 2, 4, rows=64), bias=bias)
    check(parts[0], x.double() @ weight.double().t() + bias.double())


@PRODUCTS
def test_inputs_may_be_a_slice_of_something_wider(device: torch.device, multiply: Multiply) -> None:
    wide = torch.full((20, 160), torch.nan, device=device)
    x, weight = factors(device, torch.float32, 20, 48, 96)
    wide[:, :96] = x
    parts = torch.full((1, 20, 48), torch.nan, device=device)
    multiply(wide[:, :96], weight, parts, Tiles(16, 32, 2, 4))
    check(parts[0], x.double() @ weight.double().t())


@PRODUCTS
def test_a_row_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype, multiply: Multiply) -> None:
    """At one padded number of rows; not a number in a neighbour does not reach it."""
    x, weight = factors(device, dtype, 16, 40, 128)
    tiles = Tiles(32, 32, 2, 4, splits=2)
    many = torch.empty(2, 16, 40, device=device)
    multiply(x, weight, many, tiles)
    few = torch.empty(2, 3, 40, device=device)
    company = torch.stack((x[7], torch.full_like(x[7], torch.nan), x[2]))
    multiply(company, weight, few, tiles)
    assert torch.equal(few[:, 0], many[:, 7])
    assert torch.equal(few[:, 2], many[:, 2])
    assert few[:, 1].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 65, 256, 300])
def test_bits_do_not_depend_on_the_number_of_rows(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """With the same columns and splits, however rows are tiled."""
    x, weight = factors(device, dtype, 300, 40, 320)
    tiles = Tiles(32, 64, 2, 4, splits=2)
    all_parts, parts = (torch.empty(2, count, 40, device=device) for count in (300, rows))
    tiled_product(x, weight, all_parts, replace(tiles, rows=128))
    tiled_product(x[:rows], weight, parts, tiles)
    assert torch.equal(parts, all_parts[:, :rows])
    all_gated, gated = (torch.empty(count, 20, dtype=dtype, device=device) for count in (300, rows))
    tiled_gate_up(x, weight, all_gated, Tiles(32, 64, 2, 4, rows=64))
    tiled_gate_up(x[:rows], weight, gated, Tiles(32, 64, 2, 4))
    assert torch.equal(gated, all_gated[:rows])


def test_rows_are_padded_to_what_the_matrix_units_take() -> None:
    tiles = Tiles(64, 64, 4, 4)
    counts = (1, 2, 16, 17, 32, 33, 64, 65, 256, 257, 5000)
    assert [tiles.rows_of(rows) for rows in counts] == [16, 16, 16, 32, 32, 64, 64, 128, 256, 256, 256]
    assert replace(tiles, rows=64).rows_of(65) == 64


@pytest.mark.parametrize(
    ("outputs", "columns", "splits"),
    [
        (2560, 2048, 2),  # a split more would give some processors two programs, and others one
        (2048, 11008, 4),
        (1536, 1536, 4),
        (1024, 3072, 8),
        (4608, 3584, 1),
        (22016, 2048, 1),
        (192, 4096, 8),  # as many parts as readers want to add up
        (64, 256, 2),  # no split is shorter than a tile
        (64, 32, 1),
    ],
)
def test_columns_are_split_for_the_whole_chip_and_no_further(outputs: int, columns: int, splits: int) -> None:
    assert tiles_for(32, outputs, columns).splits == splits


@pytest.mark.parametrize("rows", [2, 4, 5, 16, 32, 64])
@pytest.mark.parametrize("shared_memory", [LEAST_SHARED_MEMORY, 227 * 1024])
@pytest.mark.parametrize("role", ["read", "gate_up", "head"])
def test_tiles_fit_into_shared_memory(rows: int, shared_memory: int, role: Role) -> None:
    product = Product(role, 2048, 2048, torch.float16)
    tiles = FormsByRule(product, shared_memory, is_interpreted=True).of(rows)
    assert isinstance(tiles, Tiles)
    assert tiles.stages >= 2
    assert tiles.shared_memory(rows, 2, num_weights=product.tiled_weights) <= shared_memory
