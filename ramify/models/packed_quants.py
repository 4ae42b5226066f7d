"""The number formats of weights that GPTQ, AWQ and FP8 checkpoints hold: blocks made of their numbers, and read again.

    INT4, INT8   weight = (number - zero point) * scale, exact in float32: at most 9 bits times 11
    FP8          weight = number * scale, rounded once

The blocks' layout stands in number_formats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.models.gguf_quants import QuantFormat
from ramify.models.number_formats import FP8_BLOCK, FP8_FORMAT, INT4_FORMATS, INT8_FORMATS, NumberFormat, group_format
from ramify.models.quantization_config import Quantization
from ramify.models.stored import StoredTensor

USUAL = 0.02  # the standard deviation of random weights


def dequantize_int4(blocks: Tensor, out: Tensor) -> None:
    packed = blocks[:, 4:].reshape(len(blocks), -1, 16)
    halves = out.view(len(blocks), -1, 2, 16)
    halves[:, :, 0] = packed & 0x0F
    halves[:, :, 1] = packed >> 4
    out.sub_(blocks[:, 2:3]).mul_(_halves(blocks))


def dequantize_int8(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 4:])
    out.sub_(blocks[:, 2:3]).mul_(_halves(blocks))


def dequantize_fp8(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 4:].view(torch.float8_e4m3fn))
    out.mul_(blocks[:, :4].contiguous().view(torch.float32))


def _halves(blocks: Tensor) -> Tensor:
    """The scales, float32 (num_blocks, 1)."""
    return blocks[:, :2].contiguous().view(torch.float16).float()


def _format(facts: NumberFormat, dequantize_blocks: Callable[[Tensor, Tensor], None]) -> QuantFormat:
    return QuantFormat(facts.name, facts.type_id, facts.block_size, facts.block_bytes, torch.float32, dequantize_blocks)


PACKED_FORMATS: Mapping[str, QuantFormat] = MappingProxyType(
    {
        **{each.name: _format(each, dequantize_int4) for each in INT4_FORMATS},
        **{each.name: _format(each, dequantize_int8) for each in INT8_FORMATS},
        FP8_FORMAT.name: _format(FP8_FORMAT, dequantize_fp8),
    }
)
FP8 = PACKED_FORMATS[FP8_FORMAT.name]


class Groups(NamedTuple):
    """A weight as GPTQ and AWQ hold it."""

    numbers: Tensor  # uint8 (outputs, depth)
    scales: Tensor  # (outputs, groups)
    zeros: Tensor  # uint8 (outputs, groups)
    size: int  # columns of a group; the last may have fewer
    bits: int

    def dequantized(self, group_of: Tensor | None = None) -> Tensor:
        """float32 (outputs, depth); group_of (depth,) says which group each column is in, if not in their order."""
        of = torch.arange(self.numbers.shape[1]) // self.size if group_of is None else group_of
        return (self.numbers.float() - self.zeros[:, of]) * self.scales.float()[:, of]


def group_blocks(groups: Groups, order: Tensor | None = None) -> StoredTensor | None:
    """None: no block holds these exactly. order: the columns of `numbers` are these columns of the weight."""
    numbers, scales, zeros, group_size, bits = groups
    outputs, depth = numbers.shape
    facts, halves = group_format(bits, group_size, depth), halves_of(scales)
    if facts is None or halves is None:
        return None
    quant_format = PACKED_FORMATS[facts.name]
    size, repeats = quant_format.block_size, group_size // quant_format.block_size
    count = depth // size
    blocks = numbers.new_empty(outputs, count, quant_format.block_bytes)
    by_block = halves.repeat_interleave(repeats, dim=1)[:, :count].contiguous()  # the last group may be shorter
    blocks[:, :, :2] = by_block.view(torch.uint8).view(outputs, count, 2)
    blocks[:, :, 2] = zeros.repeat_interleave(repeats, dim=1)[:, :count]
    blocks[:, :, 3] = 0
    if bits == 8:
        blocks[:, :, 4:] = numbers.view(outputs, count, size)
    else:
        halved = numbers.view(outputs, count, size // 32, 2, 16)
        packed = halved[:, :, :, 1] << 4
        blocks[:, :, 4:] = packed.bitwise_or_(halved[:, :, :, 0]).view(outputs, count, size // 2)
    return StoredTensor(blocks.view(-1), quant_format, (outputs, depth), order)


def halves_of(scales: Tensor) -> Tensor | None:
    """In float16; None: it does not have them all."""
    halves = scales.to(torch.float16)
    return halves if torch.equal(halves.to(scales.dtype), scales) else None


def fp8_blocks(weight: Tensor, scales: Tensor) -> StoredTensor | None:
    """weight float8 (outputs, depth), a scale for each 128 x 128 of it. None: rows are not whole blocks."""
    outputs, depth = weight.shape
    if depth % FP8_BLOCK:
        return None
    count = depth // FP8_BLOCK
    blocks = torch.empty(outputs, count, FP8.block_bytes, dtype=torch.uint8)
    by_row = scales.float().repeat_interleave(FP8_BLOCK, dim=0)[:outputs].contiguous()
    blocks[:, :, :4] = by_row.view(torch.uint8).view(outputs, count, 4)
    blocks[:, :, 4:] = weight.view(torch.uint8).view(outputs, count, FP8_BLOCK)
    return StoredTensor(blocks.view(-1), FP8, (outputs, depth))


def dequantized_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    outputs, depth = weight.shape
    spread = scales.float().repeat_interleave(FP8_BLOCK, dim=0)[:outputs]
    return weight.float() * spread.repeat_interleave(FP8_BLOCK, dim=1)[:, :depth]


def random_blocks(quantization: Quantization, shape: tuple[int, int], generator: torch.Generator) -> StoredTensor:
    """Random weights of a usual magnitude, on the generator's device; as float32 where no block holds such rows."""
    outputs, depth = shape
    group_size = depth if quantization.group_size == -1 else quantization.group_size
    facts = None if depth % FP8_BLOCK else FP8_FORMAT
    if quantization.method != "fp8":
        facts = group_format(quantization.bits, group_size, depth)
    device = generator.device
    if facts is None:
        return StoredTensor.of(torch.empty(shape, device=device).normal_(0.0, USUAL, generator=generator))
    quant_format = PACKED_FORMATS[facts.name]
    count = outputs * depth // facts.block_size
    blocks = torch.empty(count, facts.block_bytes, dtype=torch.uint8, device=device).random_(generator=generator)
    if quantization.method == "fp8":
        blocks[:, 4:] &= 0xF7  # not what is no number
        scale = torch.tensor([USUAL / 100], dtype=torch.float32, device=device)
    else:
        middle = 2 ** (quantization.bits - 1)
        blocks[:, 2] = middle
        scale = torch.tensor([USUAL * 12**0.5 / (2 * middle)], dtype=torch.float16, device=device)
    octets = scale.view(torch.uint8)
    blocks[:, : len(octets)] = octets
    return StoredTensor(blocks.view(-1), quant_format, shape)
