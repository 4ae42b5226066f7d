"""Weights of few bits in a GPU's memory: the numbers of a weight's rows in one tensor, their scales in others.

    INT4    numbers (outputs, depth / 2): of each block, byte j holds column j below and column j + block / 2 above
    INT8    numbers (outputs, depth)
    FP8     numbers (outputs, depth) e4m3

with scales (outputs, blocks) and, but for FP8, zeros (outputs, blocks). A weight is (number - zero) * scale. Products
are exact in any precision: numbers less their zeros are whole numbers of at most nine bits, which bfloat16 holds too,
and scales multiply the sums of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.models.decoder import Decoder, linears
from ramify.models.gguf_quants import QuantFormat
from ramify.models.linear import Linear
from ramify.models.packed_quants import FP8, PACKED_FORMATS
from ramify.models.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class DensePart:
    """Some rows of a weight as numbers: what is not quantised, or in a format that has no kernel here."""

    stored_in: QuantFormat
    weight: Tensor  # (outputs, depth)
    order: None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids].float()


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some rows of a weight in one of the packed formats."""

    stored_in: QuantFormat
    numbers: Tensor
    scales: Tensor  # float16 (outputs, blocks), of FP8 float32
    zeros: Tensor  # uint8 (outputs, blocks); of FP8 one that nobody reads
    order: Tensor | None  # int64 (depth,): which column of the weight stands in each place

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        order = () if self.order is None else (self.order,)
        return (self.numbers, self.scales, self.zeros, *order)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.stored_in.block_size

    def rows(self, ids: Tensor) -> Tensor:
        """int64 (T,) -> these rows as float32 (T, depth)."""
        size, scales = self.stored_in.block_size, self.scales[ids].float()
        numbers = self.numbers[ids]
        if self.is_nibbles:
            numbers = numbers.view(len(ids), -1, size // 2)
            numbers = torch.cat((numbers & 0x0F, numbers >> 4), dim=2)
        found = numbers.view(len(ids), -1, size).float()
        if self.stored_in.name != FP8.name:
            found -= self.zeros[ids].float()[:, :, None]
        found = (found * scales[:, :, None]).view(len(ids), -1)
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)

    @property
    def is_nibbles(self) -> bool:
        return self.stored_in.name.startswith("INT4")


class DevicePacking:
    """Brings weights to a device in the bits that they are stored in, where there are kernels for them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of what is not held quantised."""
        self.device = device
        self.dtype = dtype

    def pack(self, weight: StoredTensor) -> DensePart | PackedPart:
        if weight.quant_format.name not in PACKED_FORMATS:
            return DensePart(weight.quant_format, weight.numbers().to(self.device, self.dtype, copy=True))
        size, outputs = weight.quant_format.block_size, weight.shape[0]
        blocks = weight.data.to(self.device).view(outputs, -1, weight.quant_format.block_bytes)
        numbers, order = blocks[:, :, 4:], None if weight.order is None else weight.order.long().to(self.device)
        if weight.quant_format.name == FP8.name:
            scales = blocks[:, :, :4].contiguous().view(torch.float32).view(outputs, -1)
            octets = numbers.reshape(outputs, -1).contiguous().view(torch.float8_e4m3fn)
            return PackedPart(weight.quant_format, octets, scales, scales.new_empty(0), order)
        scales = blocks[:, :, :2].contiguous().view(torch.float16).view(outputs, -1)
        if weight.quant_format.name.startswith("INT4"):
            numbers = _halved(numbers, size)
        dense = numbers.reshape(outputs, -1).contiguous()  # of one block, reshaping alone would be a view
        return PackedPart(weight.quant_format, dense, scales, blocks[:, :, 2].contiguous(), order)


def _halved(numbers: Tensor, size: int) -> Tensor:
    """Nibbles by 32 weights, low ones first, to nibbles by blocks: (outputs, blocks, size / 2) both."""
    pairs = numbers.reshape(*numbers.shape[:2], size // 32, 16)
    columns = torch.stack((pairs & 0x0F, pairs >> 4), dim=3).view(*numbers.shape[:2], size)
    return columns[:, :, : size // 2] | columns[:, :, size // 2 :] << 4


def settle(decoder: Decoder) -> None:
    """Matrices of which no part is quantised become plain tensors; so does the embedding, which is looked up."""
    for linear in linears(decoder):
        parts = [part for _, part in sorted(linear.parts.items())]
        if parts and (linear is decoder.table or all(isinstance(part, DensePart) for part in parts)):
            _make_dense(linear, decoder)


def _make_dense(linear: Linear, decoder: Decoder) -> None:
    parts = [part for _, part in sorted(linear.parts.items())]
    dense = [
        part.weight
        if isinstance(part, DensePart)
        else part.rows(torch.arange(part.shape[0], device=decoder.device)).to(decoder.dtype)
        for part in parts
        if isinstance(part, DensePart | PackedPart)
    ]
    linear.parts.clear()
    linear.weight = dense[0] if len(dense) == 1 else torch.cat(dense)
