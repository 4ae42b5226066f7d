"""Weights of few bits in a GPU's memory: words in the order in which threads read them.

A tile is 16 outputs by 128 columns; rows and columns are filled up to whole tiles with zeros. A load takes 16 bytes for
each of 32 threads; of a tile, 4 bits take 2 loads and 8 bits 4. Thread 4 g + q has outputs g and g + 8, and of every 32
columns those from 8 q on, which is what a matrix instruction wants of it:

    column = 32 u + 8 q + 4 s + 2 r + h      output = 8 p + g
    INT4    load u / 2, word 2 (u % 2) + s, bits from 16 h + 8 r + 4 p on
    INT8    load u, word 2 s + r, bits from 16 h + 8 p on; so does FP8, in e4m3

A weight is (number - zero) * scale; of each block of 128 or 32 columns and each output one word holds the scale in
float16 below and the zero above, of FP8 the scale in float32. Numbers less their zeros are whole numbers of at most
eight bits and a sign, which float16 and bfloat16 hold exactly, and scales multiply the sums of a block: products are
those of the dequantised weight up to the order of sums.
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

OUTPUTS, COLUMNS = 16, 128  # of a tile


@dataclass(frozen=True, slots=True)
class DensePart:
    """Some rows of a weight as numbers: what is not quantised, or in a format that has no kernel here."""

    stored_in: QuantFormat
    weight: Tensor  # (outputs, depth)
    order: None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

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
    shape: tuple[int, int]  # outputs, depth
    numbers: Tensor  # int32 (tiles of outputs, tiles of columns, loads, 32, 4)
    scales: Tensor  # int32 (tiles of outputs, tiles of columns, blocks, 8, 2): outputs g and g + 8
    order: Tensor | None  # int64 (depth,): which column of the weight stands in each place

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        order = () if self.order is None else (self.order,)
        return (self.numbers, self.scales, *order)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits(self) -> int:
        return 4 if self.stored_in.name.startswith("INT4") else 8

    @property
    def is_float(self) -> bool:
        return self.stored_in.name == FP8.name

    @property
    def blocks(self) -> int:
        """Of a tile's columns."""
        return COLUMNS // self.stored_in.block_size

    def rows(self, ids: Tensor) -> Tensor:
        """int64 (T,) -> these rows as float32 (T, depth)."""
        place, own = torch.arange(len(ids), device=ids.device), ids % OUTPUTS
        numbers = _read_numbers(self.numbers[ids // OUTPUTS], self.bits)[place, own // 8, own % 8]
        words = self.scales[ids // OUTPUTS][place, :, :, own % 8, own // 8]  # (T, tiles, blocks)
        if self.is_float:
            found, scales = numbers.view(torch.float8_e4m3fn).float(), words.view(torch.float32)
            found = found.view(*words.shape, -1)
        else:
            halves = words.view(torch.int16).view(*words.shape, 2)
            scales = halves[..., 0].contiguous().view(torch.float16).float()
            found = numbers.float().view(*words.shape, -1) - halves[..., 1, None].float()
        found = (found * scales[..., None]).view(len(ids), -1)[:, : self.shape[1]]
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)


class DevicePacking:
    """Brings weights to a device in the bits that they are stored in, where there are kernels for them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of what is not held quantised."""
        self.device = device
        self.dtype = dtype

    def pack(self, weight: StoredTensor) -> DensePart | PackedPart:
        stored_in, (outputs, depth) = weight.quant_format, weight.shape
        if stored_in.name not in PACKED_FORMATS:
            return DensePart(stored_in, weight.numbers().to(self.device, self.dtype, copy=True))
        blocks = weight.data.to(self.device).view(outputs, -1, stored_in.block_bytes)
        numbers, order = blocks[:, :, 4:], None if weight.order is None else weight.order.long().to(self.device)
        if stored_in.name == FP8.name:
            words = blocks[:, :, :4].contiguous().view(torch.int32)[:, :, 0]
        else:
            scales = blocks[:, :, :2].contiguous().view(torch.int16)[:, :, 0].int() & 0xFFFF
            words = scales | blocks[:, :, 2].int() << 16
        if stored_in.name.startswith("INT4"):
            pairs = numbers.reshape(outputs, -1, 16)
            numbers, bits = torch.stack((pairs & 0x0F, pairs >> 4), dim=2), 4
        else:
            bits = 8
        filled = numbers.new_zeros(-(-outputs // OUTPUTS) * OUTPUTS, -(-depth // COLUMNS) * COLUMNS)
        filled[:outputs, :depth] = numbers.reshape(outputs, depth)
        per_tile = COLUMNS // stored_in.block_size
        filled_words = words.new_zeros(len(filled), filled.shape[1] // stored_in.block_size)
        filled_words[:outputs, : words.shape[1]] = words
        tiles = filled_words.view(-1, 2, 8, filled.shape[1] // COLUMNS, per_tile)
        return PackedPart(
            stored_in,
            (outputs, depth),
            _lay_out(filled, bits),
            tiles.permute(0, 3, 4, 2, 1).contiguous(),  # (tiles of outputs, of columns, blocks, g, p)
            order,
        )


# Of bytes: tiles of outputs, of columns, u or its half, g, q, then what a thread has. The dimensions that come before
# are tiles of outputs, p, g, tiles of columns, u, q, s, r, h, where of 4 bits u is halved in two.
_NIBBLES = (0, 3, 4, 2, 6, 5, 7, 9, 8, 1)
_OCTETS = (0, 3, 4, 2, 5, 6, 7, 8, 1)


def _lay_out(numbers: Tensor, bits: int) -> Tensor:
    """uint8 (outputs, depth), whole tiles -> int32 (tiles of outputs, tiles of columns, loads, 32, 4)."""
    tiles, groups = numbers.shape[0] // OUTPUTS, numbers.shape[1] // COLUMNS
    if bits == 4:
        parts = numbers.view(tiles, 2, 8, groups, 2, 2, 4, 2, 2, 2).permute(_NIBBLES)
        octets = parts[..., 0] | parts[..., 1] << 4
    else:
        octets = numbers.view(tiles, 2, 8, groups, 4, 4, 2, 2, 2).permute(_OCTETS)
    return octets.contiguous().view(-1).view(torch.int32).view(tiles, groups, bits // 2, 32, 4)


def _read_numbers(words: Tensor, bits: int) -> Tensor:
    """int32 (tiles, tiles of columns, loads, 32, 4) -> uint8 (tiles, 2, 8, depth): outputs 8 p + g."""
    tiles, groups = words.shape[:2]
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        nibbles = torch.stack((octets & 0x0F, octets >> 4), dim=-1)
        parts = nibbles.view(tiles, groups, 2, 8, 4, 2, 2, 2, 2, 2).permute(_inverse(_NIBBLES))
    else:
        parts = octets.view(tiles, groups, 4, 8, 4, 2, 2, 2, 2).permute(_inverse(_OCTETS))
    return parts.reshape(tiles, 2, 8, groups * COLUMNS)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(place) for place in range(len(order)))


def settle(decoder: Decoder) -> None:
    """Matrices of which no part is quantised become plain tensors; so does the embedding, which is looked up.

    Parts of one format become one, for one kernel.
    """
    for linear in linears(decoder):
        parts = [part for _, part in sorted(linear.parts.items())]
        if parts and (linear is decoder.table or all(isinstance(part, DensePart) for part in parts)):
            _make_dense(linear, decoder)
        elif len(parts) > 1:
            joined = _joined([part for part in parts if isinstance(part, PackedPart)])
            if joined is not None and joined.shape[0] == linear.weight.shape[0]:
                linear.parts = {0: joined}


def _joined(parts: list[PackedPart]) -> PackedPart | None:
    """None: they are not of one format, or do not end where tiles end."""
    first = parts[0]
    for part in parts:
        if part.stored_in != first.stored_in or (part.order is None) != (first.order is None):
            return None
        if part is not parts[-1] and part.shape[0] % OUTPUTS:
            return None
    return PackedPart(
        first.stored_in,
        (sum(part.shape[0] for part in parts), first.shape[1]),
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        first.order,
    )


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
