"""Weights of few bits in the order in which kernels read them: the numbers that the blocks hold, in whatever form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ramify.gpu.kernels.unpacked import unpack
from ramify.gpu.packed_parts import OUTPUTS, DevicePacking, PackedPart
from ramify.models.packed_quants import PACKED_FORMATS
from tests.quantised import stored


def packed(name: str, outputs: int, columns: int, device: torch.device) -> PackedPart:
    part = DevicePacking(device, torch.float16).pack(stored(name, outputs, columns, seed=outputs))
    assert isinstance(part, PackedPart)
    return part


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_rows_are_those_of_the_blocks(name: str, device: torch.device) -> None:
    """In the order of the weight's own columns, whatever order they are held in."""
    weight = stored(name, 20, 384, seed=1)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ids = torch.tensor([19, 0, 7, 7, 8], device=device)
    for each in (weight, replace(weight, order=order)):
        part = DevicePacking(device, torch.float16).pack(each)
        assert torch.equal(part.rows(ids).cpu(), each.numbers()[ids.cpu()])


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_unpacked_weights_are_exact(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Rounded once, to what is asked for; columns that are no whole tiles, and outputs from any tile on."""
    columns = 160 if name.endswith("x32") else 256
    weight = stored(name, 40, columns, seed=2)
    part = DevicePacking(device, dtype).pack(weight)
    assert isinstance(part, PackedPart)
    for first_tile in (0, 1):
        out = torch.full((40 - first_tile * OUTPUTS, columns), torch.nan, dtype=dtype, device=device)
        unpack(part, first_tile, out)
        assert torch.equal(out.cpu(), weight.numbers()[first_tile * OUTPUTS :].to(dtype))


def test_where_a_weight_lies(device: torch.device) -> None:
    """By the formulas of packed_parts.py, one weight at a time."""
    for name, bits in (("INT4x128", 4), ("INT8x32", 8)):
        weight = stored(name, 32, 256, seed=32)
        part = packed(name, 32, 256, device)
        numbers, scales = part.numbers.cpu(), part.scales.cpu()
        dequantised = weight.numbers()
        for output, column in ((0, 0), (31, 255), (9, 77), (23, 130), (6, 201)):
            g, p, place = output % 8, output // 8 % 2, column % 128
            u, q, s, r, h = place // 32, place // 8 % 4, place // 4 % 2, place // 2 % 2, place % 2
            load, word, shift = (u // 2, 2 * (u % 2) + s, 16 * h + 8 * r + 4 * p)
            if bits == 8:
                load, word, shift = u, 2 * s + r, 16 * h + 8 * p
            number = int(numbers[output // 16, column // 128, load, 4 * g + q, word]) >> shift & (2**bits - 1)
            scale_word = scales[output // 16, column // 128, 0 if bits == 4 else u, g, p].view(1)
            scale, zero = scale_word.view(torch.float16)[0], int(scale_word) >> 16
            assert float(dequantised[output, column]) == (number - zero) * float(scale)
