"""Hugging Face folders: config.json and safetensors files, single or sharded, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ramify.errors import WeightsError
from ramify.models.quantised_headers import QuantisedMatrices
from ramify.models.quantised_matrix import read_matrix
from ramify.models.safetensors_folder import header_of, open_tensors, read_architecture
from ramify.models.stored import Part, StoredTensor
from ramify.models.weights import EMBEDDING, PartOf, whole


class SafetensorsCheckpoint:
    """The tensors of a folder. Opening reads headers only; `stored` reads one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self.arch = read_architecture(folder)
        self._owners = open_tensors(folder, "pt")
        headers = {name: header_of(file, name) for name, file in self._owners.items()}
        self._quantised = None if self.arch.quantization is None else QuantisedMatrices(self.arch.quantization, headers)
        self._spare = () if self._quantised is None else self._quantised.spare_biases(self.arch)
        self._shapes = {name: header.shape for name, header in headers.items() if name not in self._spare}
        if self._quantised is not None:
            self._shapes = self._quantised.as_weights(self._shapes)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def stored(self, part_of: PartOf = whole) -> Iterator[tuple[str, Tensor | StoredTensor]]:
        for name in self._spare:
            if bool(_read(self._owners[name], name, None).any()):
                raise WeightsError(f"{name} is not zero, and the model has no such bias")
        # The embedding first, so that a tied head stored again can be compared with it.
        for name in sorted(self._shapes, key=lambda each: each != EMBEDDING):
            yield name, self._stored(name, part_of(name))

    def _stored(self, name: str, part: Part | None) -> Tensor | StoredTensor:
        if self._quantised is None or name not in self._quantised.by_name:
            return _read(self._owners[name], name, part)
        whole_matrix = read_matrix(self._quantised, name, lambda each: _read(self._owners[each], each, None))
        return whole_matrix if part is None else whole_matrix.cut(part)


def _read(file: Any, name: str, part: Part | None) -> Tensor:
    if part is None:
        tensor: Tensor = file.get_tensor(name)
        return tensor
    own = slice(part.start, part.stop)
    cut: Tensor = file.get_slice(name)[own] if part.dimension == 0 else file.get_slice(name)[:, own]
    return cut
