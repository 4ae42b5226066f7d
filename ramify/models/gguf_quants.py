"""The number formats of GGUF tensors: how many bytes a block has, and how to read its weights.

A quantised row is a run of equal blocks, each with `block_size` small integers and the scales to turn them back into
weights. Every format is one function in the table at the end. It reads `blocks`, uint8 (num_blocks, block_bytes), and
fills `out`, float32 (num_blocks, block_size), on any device.

Products and sums are rounded in the order of the reference (`gguf.quants`), so that results are the same bit for bit.
Hence no fused operation (addcmul, lerp) appears here: it would round once instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ramify.models.number_formats import FP8_FORMAT, GGUF_FORMATS, NumberFormat

# Weights dequantised at a time. On a CPU a chunk and its temporaries should fit in the cache, and yet be large enough
# for torch to split between threads. On a GPU launches cost more than memory traffic.
CPU_CHUNK_WEIGHTS = 1 << 19
DEVICE_CHUNK_WEIGHTS = 1 << 24


@dataclass(frozen=True, slots=True)
class QuantFormat(NumberFormat):
    """One number format; `weights_dtype` is the dtype of its weights once they are read."""

    weights_dtype: torch.dtype
    dequantize_blocks: Callable[[Tensor, Tensor], None]

    @property
    def is_quantised(self) -> bool:
        return self.block_size > 1

    @property
    def holds_integers(self) -> bool:
        """Whether weights are integers with scales: all quantised ones but short floating-point numbers."""
        return self.is_quantised and self.name != FP8_FORMAT.name


def dequantize(data: Tensor, quant_format: QuantFormat) -> Tensor:
    """The weights in `data` (contiguous uint8, whole blocks) as a flat float32 tensor on the same device."""
    blocks = data.view(-1, quant_format.block_bytes)
    out = torch.empty(len(blocks), quant_format.block_size, dtype=torch.float32, device=data.device)
    weights_per_chunk = CPU_CHUNK_WEIGHTS if data.device.type == "cpu" else DEVICE_CHUNK_WEIGHTS
    num_chunk_blocks = weights_per_chunk // quant_format.block_size
    for start in range(0, len(blocks), num_chunk_blocks):
        chunk = slice(start, start + num_chunk_blocks)
        quant_format.dequantize_blocks(blocks[chunk], out[chunk])
    return out.view(-1)


def dequantize_f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def dequantize_f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def dequantize_bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def dequantize_q8_0(blocks: Tensor, out: Tensor) -> None:
    """scale f16 | 32 x int8"""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def dequantize_q4_0(blocks: Tensor, out: Tensor) -> None:
    """scale f16 | 16 bytes of nibbles, offset by 8"""
    _unpack_nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def dequantize_q4_1(blocks: Tensor, out: Tensor) -> None:
    """scale f16 | minimum f16 | 16 bytes of nibbles"""
    _unpack_nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def dequantize_q5_0(blocks: Tensor, out: Tensor) -> None:
    """scale f16 | 32 fifth bits | 16 bytes of nibbles, offset by 16"""
    out.copy_(_five_bits(blocks[:, 2:6], blocks[:, 6:]))
    out.sub_(16).mul_(_half(blocks, 0))


def dequantize_q5_1(blocks: Tensor, out: Tensor) -> None:
    """scale f16 | minimum f16 | 32 fifth bits | 16 bytes of nibbles"""
    out.copy_(_five_bits(blocks[:, 4:8], blocks[:, 8:]))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def dequantize_q4_k(blocks: Tensor, out: Tensor) -> None:
    """scale f16 | scale of minima f16 | 12 bytes: 8 x (scale, minimum) of 6 bits | 128 bytes of nibbles"""
    scale, minimum = _six_bit_scales(blocks)
    # Four runs of 32 bytes; each gives 32 weights from its low nibbles, then 32 from its high ones.
    nibbles = blocks[:, 16:].reshape(-1, 4, 32)
    pairs = out.view(-1, 4, 2, 32)
    pairs[:, :, 0] = nibbles & 0x0F
    pairs[:, :, 1] = nibbles >> 4
    out.view(-1, 8, 32).mul_(scale).sub_(minimum)


def dequantize_q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit j of byte i is for weight i of run j."""
    scale, minimum = _six_bit_scales(blocks)
    fifth = blocks[:, 16:48].contiguous()  # (n, 32)
    nibbles = blocks[:, 48:].reshape(-1, 4, 32)
    runs = out.view(-1, 8, 32)
    for run in range(8):
        low = nibbles[:, run // 2] >> 4 if run % 2 else nibbles[:, run // 2] & 0x0F
        runs[:, run] = ((fifth >> run) & 1).mul_(16).bitwise_or_(low)
    runs.mul_(scale).sub_(minimum)


def dequantize_q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low nibbles | 64 bytes of upper bit pairs | 16 x int8 scale | scale f16, offset by 32"""
    # Each half of the block has 128 weights in four runs of 32, from 64 bytes of nibbles and 32 of pairs.
    nibbles = blocks[:, :128].reshape(-1, 2, 2, 32)  # (n, half, run % 2, 32)
    upper = blocks[:, 128:192].reshape(-1, 2, 32)  # (n, half, 32)
    runs = out.view(-1, 2, 4, 32)
    for run in range(4):
        low = nibbles[:, :, run % 2] >> 4 if run >= 2 else nibbles[:, :, run] & 0x0F
        runs[:, :, run] = ((upper >> (2 * run)) & 3).mul_(16).bitwise_or_(low)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))  # (n, 16)
    out.sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 of shape (num_blocks, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _unpack_nibbles(packed: Tensor, out: Tensor) -> None:
    """(n, 16) bytes to (n, 32) numbers: first all low nibbles, then all high ones."""
    packed = packed.contiguous()  # so that the strided blocks are read once, not twice
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4


def _five_bits(fifth: Tensor, packed: Tensor) -> Tensor:
    """(n, 4) bytes of fifth bits and (n, 16) bytes of nibbles to uint8 (n, 32) in 0..31."""
    weights = packed.new_empty((len(packed), 32))
    _unpack_nibbles(packed, weights)
    shifts = torch.arange(8, dtype=torch.uint8, device=fifth.device)
    bits = (fifth.unsqueeze(2) >> shifts).bitwise_and_(1).mul_(16)  # (n, 4, 8)
    return weights.bitwise_or_(bits.view(-1, 32))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 runs of a Q4_K or Q5_K block, each float32 (n, 8, 1).

    Of the 12 packed bytes, 0..3 and 4..7 hold the scales and minima of runs 0..3 in their low six bits. Runs
    4..7 have four low bits in bytes 8..11 (scale below, minimum above) and two high bits atop bytes 0..7.
    """
    scales, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([scales & 0x3F, (rest & 0x0F) | ((scales >> 2) & 0x30)], dim=1)
    minimum = torch.cat([minima & 0x3F, (rest >> 4) | ((minima >> 2) & 0x30)], dim=1)
    return (
        scale.float().mul_(_half(blocks, 0)).unsqueeze(2),
        minimum.float().mul_(_half(blocks, 2)).unsqueeze(2),
    )


_DEQUANTIZERS: Mapping[str, Callable[[Tensor, Tensor], None]] = MappingProxyType(
    {
        "F32": dequantize_f32,
        "F16": dequantize_f16,
        "BF16": dequantize_bf16,
        "Q8_0": dequantize_q8_0,
        "Q4_0": dequantize_q4_0,
        "Q4_1": dequantize_q4_1,
        "Q5_0": dequantize_q5_0,
        "Q5_1": dequantize_q5_1,
        "Q4_K": dequantize_q4_k,
        "Q5_K": dequantize_q5_k,
        "Q6_K": dequantize_q6_k,
    }
)
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}

FORMATS_BY_NAME: Mapping[str, QuantFormat] = MappingProxyType(
    {
        each.name: QuantFormat(
            each.name,
            each.type_id,
            each.block_size,
            each.block_bytes,
            _DTYPES.get(each.name, torch.float32),
            _DEQUANTIZERS[each.name],
        )
        for each in GGUF_FORMATS
    }
)
FORMATS_BY_DTYPE: Mapping[torch.dtype, QuantFormat] = MappingProxyType(
    {each.weights_dtype: each for each in FORMATS_BY_NAME.values() if each.block_size == 1}
)
