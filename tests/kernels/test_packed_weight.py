"""Packed weights in 16 bits, in the forms that a GPU would choose, against float64: one part and several, of one format
and of different ones, in the order of their columns and in another, with what is done around their products.

Without a GPU the kernels' own source runs on torch's operators, as in test_packed_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu import packed_forms, packed_weight
from ramify.gpu.kernels import packed_tiles as tiles_module
from ramify.gpu.kernels import unpacked as unpacked_module
from ramify.gpu.kernels.packed_tiles import RowBlocks
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.packed_forms import PackedForm
from ramify.gpu.packed_parts import DevicePacking, PackedPart
from ramify.gpu.packed_weight import PackedWeight
from ramify.gpu.products import Stream
from ramify.models.linear import Linear
from tests.kernels.assembly import instructions
from tests.kernels.gluon import prepared
from tests.kernels.test_packed_rows import KERNELS, normed
from tests.kernels.test_tiled_product import check
from tests.quantised import stored

DEPTH = 256
ONE, MIXED, WITH_NUMBERS = ("INT4x128",) * 3, ("INT8x32", "INT4x32", "INT8x128"), ("INT4x128", "F16", "INT4x32")
# A number of rows, and the form that it has in the largest models: by warps, by tiles, written out.
FORMS: list[tuple[int, str]] = [(1, "warps"), (6, "warps"), (40, "warps"), (70, "tiles"), (70, "written out")]


@pytest.fixture(autouse=True)
def _kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device.type == "cpu":
        for module in (packed_forms, unpacked_module):
            monkeypatch.setattr(module, "can_multiply", lambda dtype, _: dtype.itemsize == 2)
    with prepared(device, *KERNELS, names=instructions()):
        yield


@pytest.fixture(params=FORMS, ids=lambda each: f"{each[0]} {each[1]}")
def rows(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> int:
    """Weights as small as these would always be multiplied by warps."""
    number, kind = request.param
    by_rule = packed_forms.form_for

    def form_for(
        dtype: torch.dtype, rows: int, part: PackedPart, *, is_paired: bool, can_split: bool
    ) -> PackedForm | None:
        if kind == "warps":
            return by_rule(dtype, rows, part, is_paired=is_paired, can_split=can_split)
        return None if kind == "written out" else RowBlocks(64, 2 if can_split and not is_paired else 1)

    if kind == "tiles" and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip(f"{tiles_module.__name__} is for Hopper's matrix units")
    monkeypatch.setattr(packed_weight, "form_for", form_for)
    assert isinstance(number, int)
    return number


def weight_of(
    sizes: list[int], names: tuple[str, ...], device: torch.device, *, has_order: bool = False, has_bias: bool = True
) -> tuple[PackedWeight, Tensor, Tensor]:
    """A weight of parts, the same in float64, and its bias."""
    torch.manual_seed(sum(sizes))
    order = torch.randperm(DEPTH).to(torch.int32) if has_order else None
    bias = torch.randn(sum(sizes), device=device).half() if has_bias else None
    linear = Linear(torch.empty(sum(sizes), DEPTH, device="meta"), bias)
    first_row, dense = 0, []
    for seed, (size, name) in enumerate(zip(sizes, names, strict=False)):
        weight = replace(stored(name, size, DEPTH, seed), order=order)
        linear.put(first_row, weight, DevicePacking(device, torch.float16))
        dense.append(weight.numbers().to(device).double())
        first_row += size
    zeros = torch.zeros(sum(sizes), device=device)
    return PackedWeight(linear), torch.cat(dense), (zeros if bias is None else bias).double()


def inputs_of(rows: int, device: torch.device) -> tuple[Tensor, Norm]:
    x, weight = torch.randn(rows, DEPTH, device=device).half(), torch.randn(DEPTH, device=device).half()
    return x, Norm(weight, 1e-5)


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("names", [ONE[:1], ONE, MIXED, WITH_NUMBERS])
def test_read_from_the_stream(rows: int, names: tuple[str, ...], has_order: bool, device: torch.device) -> None:
    if has_order and "F16" in names:
        pytest.skip("numbers are in their own order, and so is whatever is joined with them")
    weight, dense, bias = weight_of([48, 32, 24][: len(names)], names, device, has_order=has_order)
    x, norm = inputs_of(rows, device)
    product = weight.from_stream(Stream(x), norm)
    found = product.values.float().sum(0) + (0 if product.bias is None else product.bias.float())
    check(found.half(), normed(x, norm).double() @ dense.t() + bias)


@pytest.mark.parametrize(("inner", "names"), [(48, ONE[:2]), (48, MIXED[:2]), (40, ONE[:2]), (40, WITH_NUMBERS[:2])])
def test_gate_and_up(rows: int, inner: int, names: tuple[str, ...], device: torch.device) -> None:
    weight, dense, bias = weight_of([inner, inner], names, device)
    x, norm = inputs_of(rows, device)
    out = torch.full((rows, inner), torch.nan, device=device).half()
    weight.gated_from_stream(Stream(x), norm, out)
    gate, up = (normed(x, norm).double() @ dense.t() + bias).half().double().chunk(2, dim=1)
    check(out, F.silu(gate).half().double() * up)


@pytest.mark.parametrize("has_order", [False, True])
def test_added_to_the_stream(rows: int, has_order: bool, device: torch.device) -> None:
    weight, dense, bias = weight_of([72], ("INT8x128",), device, has_order=has_order)
    x, _ = inputs_of(rows, device)
    residual = torch.randn(rows, 72, device=device).half()
    stream = Stream(residual.clone())
    weight.into_stream(x, stream)
    check(stream.values, residual.double() + x.double() @ dense.t() + bias)


def test_logits(rows: int, device: torch.device) -> None:
    weight, dense, _ = weight_of([33], ("INT4x32",), device, has_bias=False)
    x, _ = inputs_of(rows, device)
    logits = torch.empty(rows, 33, device=device)
    weight.logits(x, logits)
    # Where a weight is made a number of 16 bits, it is rounded.
    check(logits.half(), x.double() @ dense.t())
