"""Weights as a checkpoint stores them: bytes in a number format, which become numbers when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.models.gguf_quants import FORMATS_BY_DTYPE, QuantFormat, dequantize

WEIGHTS_AT_ONCE = 2**22  # as numbers, of a matrix of which only some columns are wanted


class Part(NamedTuple):
    """The indices start … stop - 1 of one dimension of a tensor."""

    dimension: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    data: Tensor  # uint8, whole blocks one after the other, row by row
    quant_format: QuantFormat
    shape: tuple[int, ...]
    order: Tensor | None = None  # int32 (columns,): which column of the weight stands in each place; None: its own

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """A tensor of floating-point numbers, in its own format; float64 becomes float32."""
        tensor = (tensor.float() if tensor.dtype is torch.float64 else tensor).contiguous()
        return cls(tensor.view(-1).view(torch.uint8), FORMATS_BY_DTYPE[tensor.dtype], tuple(tensor.shape))

    @property
    def is_quantised(self) -> bool:
        return self.quant_format.is_quantised

    def numbers(self) -> Tensor:
        """float16, bfloat16 and float32 as stored, in the same memory; all else dequantised to float32."""
        if self.order is not None:
            found = dequantize(self.data, self.quant_format).view(self.shape)
            return torch.empty_like(found).index_copy_(1, self.order.long(), found)
        if self.is_quantised:
            return dequantize(self.data, self.quant_format).view(self.shape)
        return self.data.view(self.quant_format.weights_dtype).view(self.shape)

    def rows(self) -> Tensor:
        """uint8 (rows, bytes of a row), in the same memory: blocks never reach into the next row."""
        return self.data.view(self.shape[0], -1)

    def cut(self, part: Part) -> StoredTensor:
        """Some rows, in the same memory, or some columns of a matrix; float32 if they cut through blocks."""
        count = part.stop - part.start
        if count == self.shape[part.dimension]:
            return self
        if len(self.shape) == 1:
            return StoredTensor.of(self.numbers()[part.start : part.stop])
        if part.dimension == 0:
            own = self.rows()[part.start : part.stop].flatten()
            return StoredTensor(own, self.quant_format, (count, self.shape[1]), self.order)
        size, shape = self.quant_format.block_size, (self.shape[0], count)
        if self.order is None and part.start % size == 0 and part.stop % size == 0:
            row, width = self.rows(), self.quant_format.block_bytes
            columns = row[:, part.start // size * width : part.stop // size * width]
            return StoredTensor(columns.flatten(), self.quant_format, shape)
        rows = max(1, WEIGHTS_AT_ONCE // self.shape[1])
        some = (self.cut(Part(0, at, min(at + rows, self.shape[0]))) for at in range(0, self.shape[0], rows))
        return StoredTensor.of(torch.cat([each.numbers()[:, part.start : part.stop].float() for each in some]))

    def in_float32(self) -> StoredTensor:
        return StoredTensor.of(self.numbers().float())
