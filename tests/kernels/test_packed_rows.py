"""Rows times weights of few bits, by threads that hold them as matrix instructions want them, against float64.

Without a GPU the kernels' own source runs on torch's operators (gluon.py, assembly.py), in float16 and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels import packed_rows as rows_module
from ramify.gpu.kernels import packed_tiles as tiles_module
from ramify.gpu.kernels import unpacked as unpacked_module
from ramify.gpu.kernels.packed_rows import WarpTiles, packed_gate_up, packed_rows
from ramify.gpu.kernels.packed_tiles import RowBlocks, can_multiply_tiles, packed_gate_up_tiles, packed_tiles
from ramify.gpu.kernels.packed_words import can_multiply
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.unpacked import write_out
from ramify.gpu.packed_forms import tiles_for
from ramify.gpu.packed_parts import OUTPUTS, PackedPart
from ramify.models.packed_quants import PACKED_FORMATS
from tests.kernels.assembly import instructions
from tests.kernels.gluon import Arriving, overlaps, prepared
from tests.kernels.test_packed_parts import packed
from tests.kernels.test_tiled_product import check

HALVES = [torch.bfloat16, torch.float16]


KERNELS = ((rows_module, "_packed_rows"), (tiles_module, "_packed_tiles"), (unpacked_module, "_write_out"))


@pytest.fixture(autouse=True)
def arriving(device: torch.device) -> Iterator[Arriving]:
    with prepared(device, *KERNELS, names=instructions()) as arriving:
        yield arriving


def dequantised(part: PackedPart) -> Tensor:
    return part.rows(torch.arange(part.shape[0], device=part.numbers.device)).double()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "tiles"),
    [
        (1, 40, 256, WarpTiles(1, 2, 1)),  # the last tile half full
        (1, 16, 2304, WarpTiles(1, 2, 2)),  # more groups than a lap of turns, the last turn half empty
        (5, 72, 640, WarpTiles(2, 2, 2, splits=2)),  # splits of 3 groups and 2
        (19, 33, 256, WarpTiles(4, 1, 2)),  # three tiles of rows
        (35, 48, 384, WarpTiles(2, 4, 2)),  # two programs of rows; a warp with nothing to do
    ],
)
def test_packed_rows(
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    rows: int,
    outputs: int,
    columns: int,
    tiles: WarpTiles,
    *,
    arriving: Arriving,
) -> None:
    """Float32 up to the sum: numbers, zeros and scales are never rounded."""
    torch.manual_seed(rows)
    part = packed(name, outputs, columns, device)
    assert can_multiply(dtype, part) or device.type == "cpu"
    x = torch.randn(rows, columns, device=device).to(dtype)
    values = torch.full((tiles.splits, rows, outputs + 7), torch.nan, device=device)
    with arriving(x):
        packed_rows(x, part, values, tiles, first_output=3, overlap=overlaps(device))
    check(values.sum(0)[:, 3:-4], x.double() @ dequantised(part).t())
    assert values[:, :, :3].isnan().all()
    assert values[:, :, -4:].isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["INT4x32", "INT8x32"])
def test_columns_that_are_no_whole_tiles(device: torch.device, dtype: torch.dtype, name: str) -> None:
    part = packed(name, 16, 160, device)
    x = torch.randn(9, 160, device=device).to(dtype)
    values = torch.empty(1, 9, 16, device=device)
    packed_rows(x, part, values, WarpTiles(1, 2, 1))
    check(values[0], x.double() @ dequantised(part).t())


def normed(x: Tensor, norm: Norm) -> Tensor:
    """In x's precision, rounded where the norm's own kernel rounds."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + norm.eps)
    return (norm.weight.float() * (wide * scale).to(x.dtype).float()).to(x.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_row_with_norm_bias_and_residual(
    device: torch.device, dtype: torch.dtype, has_bias: bool, arriving: Arriving
) -> None:
    torch.manual_seed(0)
    part = packed("INT4x128", 40, 384, device)
    x = (3 * torch.randn(1, 384, device=device)).to(dtype)
    norm = Norm(torch.randn(384, device=device).to(dtype), 1e-5)
    bias = torch.randn(40, device=device).to(dtype) if has_bias else None
    residual = torch.randn(1, 1, 40, device=device).to(dtype)
    expected = normed(x, norm).double() @ dequantised(part).t()
    if bias is not None:
        expected += bias.double()
    out = torch.empty(1, 1, 40, device=device, dtype=dtype)
    with arriving(x):
        packed_rows(x, part, out, WarpTiles(1, 2, 2), bias=bias, norm=norm, overlap=overlaps(device))
    check(out[0], expected)
    added = residual.clone()
    with arriving(x, added):
        packed_rows(x, part, added, WarpTiles(1, 2, 2), bias=bias, norm=norm, adds=True, overlap=overlaps(device))
    check(added[0], residual[0].double() + expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.parametrize(
    ("rows", "tiles"), [(1, WarpTiles(2, 2, 2)), (7, WarpTiles(4, 2, 1)), (33, WarpTiles(4, 1, 1))]
)
def test_gate_and_up(
    device: torch.device, dtype: torch.dtype, name: str, rows: int, tiles: WarpTiles, arriving: Arriving
) -> None:
    torch.manual_seed(rows)
    part = packed(name, 96, 256, device)
    size = 0.01 if name == "FP8" else 1.0  # float16 ends at 65,504
    x, bias = ((size * torch.randn(*shape, device=device)).to(dtype) for shape in ((rows, 256), (96,)))
    norm = Norm((size * torch.randn(256, device=device)).to(dtype), 1e-5) if rows == 1 else None
    product = (x if norm is None else normed(x, norm)).double() @ dequantised(part).t() + bias.double()
    gate, up = product.to(dtype).double().chunk(2, dim=1)
    out = torch.full((rows, 48), torch.nan, device=device, dtype=dtype)
    with arriving(x):
        packed_gate_up(x, part, out, tiles, bias=bias, norm=norm, overlap=overlaps(device))
    check(out, F.silu(gate).to(dtype).double() * up)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "inner", "blocks"), [(70, 48, RowBlocks(64)), (130, 144, RowBlocks(256))])
def test_tiles_of_gate_and_up(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    inner: int,
    blocks: RowBlocks,
    has_bias: bool,
    *,
    arriving: Arriving,
) -> None:
    torch.manual_seed(rows)
    part = packed("INT4x128", 2 * inner, 256, device)
    if device.type == "cuda" and not can_multiply_tiles(dtype, part):
        pytest.skip("for Hopper's matrix units")
    x = torch.randn(rows, 256, device=device).to(dtype)
    bias = torch.randn(2 * inner, device=device).to(dtype) if has_bias else None
    product = x.double() @ dequantised(part).to(dtype).double().t()
    if bias is not None:
        product += bias.double()
    gate, up = product.to(dtype).double().chunk(2, dim=1)
    out = torch.full((rows, inner), torch.nan, device=device, dtype=dtype)
    with arriving(x):
        packed_gate_up_tiles(x, part, out, blocks, bias=bias, overlap=overlaps(device))
    check(out, F.silu(gate).to(dtype).double() * up)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_weights_written_out(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Rounded once; columns that are no whole tiles, outputs from any tile on."""
    columns = 672 if name.endswith("x32") else 640
    part = packed(name, 40, columns, device)
    weight = part.rows(torch.arange(40, device=device)).to(dtype)
    for first_tile in (0, 1):
        out = torch.full((40 - first_tile * OUTPUTS, columns), torch.nan, dtype=dtype, device=device)
        write_out(part, first_tile, out)
        assert torch.equal(out, weight[first_tile * OUTPUTS :])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "blocks"),
    [
        (40, 144, 256, RowBlocks(64)),  # two programs of outputs, the last with one tile
        (130, 120, 640, RowBlocks(128, splits=2)),  # splits of three groups and two; two programs of rows
        (200, 128, 128, RowBlocks(256)),
    ],
)
def test_packed_tiles(
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    rows: int,
    outputs: int,
    columns: int,
    blocks: RowBlocks,
    *,
    arriving: Arriving,
) -> None:
    """The product of the weight as rounded to the precision of the rows."""
    torch.manual_seed(rows)
    part = packed(name, outputs, columns, device)
    if device.type == "cuda" and not can_multiply_tiles(dtype, part):
        pytest.skip("for Hopper's matrix units")
    x = torch.randn(rows, columns, device=device).to(dtype)
    values = torch.full((blocks.splits, rows, outputs + 7), torch.nan, device=device)
    with arriving(x):
        packed_tiles(x, part, values, blocks, first_output=3, overlap=overlaps(device))
    weight = dequantised(part).to(dtype).double()
    check(values.sum(0)[:, 3:-4], x.double() @ weight.t())
    assert values[:, :, :3].isnan().all()
    assert values[:, :, -4:].isnan().all()
    if blocks.splits == 1:
        bias = torch.randn(outputs, device=device).to(dtype)
        whole = torch.empty(1, rows, outputs, device=device, dtype=dtype)
        packed_tiles(x / 256, part, whole, blocks, bias=bias)
        check(whole[0], (x / 256).double() @ weight.t() + bias.double())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32, 33, 64, 128])
@pytest.mark.parametrize(
    ("outputs", "columns"),
    [(2560, 2048), (2048, 2048), (2048, 11008), (11008, 2048), (27648, 5120), (5120, 27648), (96, 128)],
)
def test_tiles_by_rule(bits: int, rows: int, outputs: int, columns: int) -> None:
    """Whatever the shape, a program has something to do, and the numbers are powers of two."""
    for is_paired in (False, True):
        tiles = tiles_for(rows, outputs, columns, bits, is_paired=is_paired, can_split=not is_paired)
        assert tiles.splits * 128 <= max(columns, 128)
        assert not is_paired or tiles.tiles % 2 == 0
        assert all(number & (number - 1) == 0 for number in (tiles.tiles, tiles.warps, tiles.splits))
