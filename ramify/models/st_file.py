"""Hugging Face folders: config.json and safetensors files, single or sharded, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ramify.errors import FileFormatError, ModelNotFoundError
from ramify.files.json_file import read_json, read_optional_json
from ramify.models.families import Architecture, architecture_from_config
from ramify.models.generation_defaults import CONFIG_FILE
from ramify.models.weights import EMBEDDING, PartOf, whole
from ramify.validation import shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsCheckpoint:
    """The tensors of a folder. Opening reads headers only; `stored` reads one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self.arch = read_architecture(folder)
        self._files = _open_all(folder)
        self._shapes = {
            name: tuple(file.get_slice(name).get_shape())
            for file in self._files
            for name in file.keys()  # noqa: SIM118 - not a dict
        }
        if sum(len(file.keys()) for file in self._files) != len(self._shapes):
            raise FileFormatError(f"{folder.name}: a tensor stands in two shards")
        for name in [name for name in self._shapes if name.endswith("rotary_emb.inv_freq")]:
            del self._shapes[name]  # old Llama checkpoints store what config.json already says

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def stored(self, part_of: PartOf = whole) -> Iterator[tuple[str, Tensor]]:
        if EMBEDDING in self._shapes:  # first, so that a tied head stored again can be compared with it
            owner = next(file for file in self._files if EMBEDDING in file.keys())  # noqa: SIM118
            yield EMBEDDING, _read(owner, EMBEDDING, part_of)
        for file in self._files:
            for name in file.keys():  # noqa: SIM118
                if name != EMBEDDING and name in self._shapes:
                    yield name, _read(file, name, part_of)


def _read(file: Any, name: str, part_of: PartOf) -> Tensor:
    part = part_of(name)
    if part is None:
        tensor: Tensor = file.get_tensor(name)
        return tensor
    own = slice(part.start, part.stop)
    cut: Tensor = file.get_slice(name)[own] if part.dimension == 0 else file.get_slice(name)[:, own]
    return cut


def read_architecture(folder: Path) -> Architecture:
    return architecture_from_config(read_json(folder / "config.json"), read_optional_json(folder / CONFIG_FILE))


def _open_all(folder: Path) -> list[Any]:
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise FileFormatError(f"{INDEX} has no usable weight_map")
        files = {name: _open(folder, name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in files[name].keys():  # noqa: SIM118
                raise FileFormatError(f"{INDEX} places {shown(tensor)} in {name}, which does not hold it")
        return list(files.values())
    if (folder / SINGLE).exists():
        return [_open(folder, SINGLE)]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelNotFoundError(
            f"{folder.name} holds pickle weights (.bin, .pt), which can run code and are never loaded: "
            "convert them to safetensors"
        )
    raise ModelNotFoundError(f"{folder.name} has neither {SINGLE} nor {INDEX}")


def _open(folder: Path, name: str) -> Any:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise FileFormatError(f"{INDEX} names {shown(name)}, which is not a safetensors file of its folder")
    if (folder / name).exists() and not (folder / name).is_file():
        raise FileFormatError(f"{name} is no file")
    try:
        return safe_open(folder / name, framework="pt")
    except FileNotFoundError:
        raise ModelNotFoundError(f"{folder.name} has no {name}, which {INDEX} names") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(f"{name} is not a sound safetensors file: {error}") from None
