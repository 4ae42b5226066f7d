"""Weights as a checkpoint stores them: bytes in a number format, which become numbers when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.models.gguf_quants import FORMATS_BY_DTYPE, QuantFormat, dequantize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    data: Tensor  # uint8, whole blocks one after the other, row by row
    quant_format: QuantFormat
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """A tensor of floating-point numbers, in its own format; float64 becomes float32."""
        tensor = (tensor.float() if tensor.dtype is torch.float64 else tensor).cpu().contiguous()
        return cls(tensor.view(-1).view(torch.uint8), FORMATS_BY_DTYPE[tensor.dtype], tuple(tensor.shape))

    @property
    def is_quantised(self) -> bool:
        return self.quant_format.block_size > 1

    def numbers(self) -> Tensor:
        """float16, bfloat16 and float32 as stored, in the same memory; all else dequantised to float32."""
        if self.is_quantised:
            return dequantize(self.data, self.quant_format).view(self.shape)
        return self.data.view(self.quant_format.weights_dtype).view(self.shape)

    def rows(self) -> Tensor:
        """uint8 (rows, bytes of a row), in the same memory: blocks never reach into the next row."""
        return self.data.view(self.shape[0], -1)

    def in_float32(self) -> StoredTensor:
        return StoredTensor.of(self.numbers().float())
