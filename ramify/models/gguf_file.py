"""GGUFFile: a mapped file whose tensors are read on demand."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ramify.errors import WeightsError
from ramify.models.gguf_header import GGUFHeader, quote
from ramify.models.gguf_quants import FORMATS_BY_NAME
from ramify.models.stored import StoredTensor


class GGUFFile:
    """An open GGUF file: its header is sound and every tensor in it can be read."""

    def __init__(self, header: GGUFHeader) -> None:
        self.path, self.metadata, self.tensors = header.path, header.metadata, header.tensors
        self._contents = header.contents

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Maps and checks the file; raises a ModelError that names the file if it cannot be used."""
        return cls(GGUFHeader.open(path))

    def stored(self, name: str) -> StoredTensor:
        """The weights as they are: a view of the private map, which lives as long as any of them."""
        info = self.tensors.get(name)
        if info is None:
            raise WeightsError(f"{self.path.name} has no tensor {quote(name)}")
        data = torch.frombuffer(self._contents, dtype=torch.uint8, offset=info.offset, count=info.num_bytes)
        return StoredTensor(data, FORMATS_BY_NAME[info.quantization], info.shape)

    def tensor(self, name: str) -> Tensor:
        """The weights: float16, bfloat16 and float32 as stored, all else dequantised to float32.

        Those kept as stored are a view; writing to them never reaches the file.
        """
        return self.stored(name).numbers()

    def release(self, name: str) -> None:
        """Gives the memory of a tensor's pages back; who reads them again gets them from the file again."""
        info, page = self.tensors[name], mmap.PAGESIZE
        begin, end = -(-info.offset // page) * page, (info.offset + info.num_bytes) // page * page
        if begin < end and hasattr(mmap, "MADV_DONTNEED"):
            self._contents.madvise(mmap.MADV_DONTNEED, begin, end - begin)
