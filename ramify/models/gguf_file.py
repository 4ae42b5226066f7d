"""GGUFFile: a mapped file, its metadata, its table of tensors, and their weights on demand."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ramify.errors import FileFormatError, ModelNotFoundError, WeightsError
from ramify.models.gguf_header import MetadataValue, TensorInfo, quote, read_header
from ramify.models.gguf_quants import FORMATS_BY_NAME, dequantize


class GGUFFile:
    """An open GGUF file. Once `open` returns, the header is sound and every tensor in it can be read."""

    def __init__(
        self,
        path: Path,
        contents: mmap.mmap,
        metadata: dict[str, MetadataValue],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._contents = contents

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Maps and checks the file; raises a ModelError that names the file if it cannot be used."""
        path = Path(path)
        contents = _map(path)
        try:
            metadata, tensors = read_header(path.name, contents)
        except BaseException:
            contents.close()
            raise
        return cls(path, contents, metadata, tensors)

    def tensor(self, name: str) -> Tensor:
        """The weights: float16, bfloat16 and float32 as stored, all else dequantised to float32.

        Weights kept as stored are a view of the private map, which lives as long as any of them; writing to them never
        reaches the file.
        """
        info = self.tensors.get(name)
        if info is None:
            raise WeightsError(f"{self.path.name} has no tensor {quote(name)}")
        packed = torch.frombuffer(self._contents, dtype=torch.uint8, offset=info.offset, count=info.num_bytes)
        quant_format = FORMATS_BY_NAME[info.quantization]
        if quant_format.block_size == 1:
            return packed.view(quant_format.weights_dtype).view(info.shape)
        return dequantize(packed, quant_format).view(info.shape)


def _map(path: Path) -> mmap.mmap:
    if not path.is_file():
        raise ModelNotFoundError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise FileFormatError(f"{path.name}: the file is empty")
            # A private copy-on-write map, because torch wants writable memory.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
