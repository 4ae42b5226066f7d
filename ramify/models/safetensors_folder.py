"""A folder's safetensors files, single or sharded: opened, and what their headers say. No tensor is read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from ramify.errors import FileFormatError, ModelNotFoundError
from ramify.files.json_file import read_json, read_optional_json
from ramify.models.families import Architecture, architecture_from_config
from ramify.models.generation_defaults import CONFIG_FILE
from ramify.validation import shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Framework = Literal["pt", "np"]  # whose tensors files give: torch's, or numpy's where there is no torch


class Header(NamedTuple):
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it


def read_architecture(folder: Path) -> Architecture:
    return architecture_from_config(read_json(folder / "config.json"), read_optional_json(folder / CONFIG_FILE))


def open_tensors(folder: Path, framework: Framework) -> dict[str, Any]:
    """The file that holds each tensor, by the tensor's name."""
    files = _open_all(folder, framework)
    owners = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
    if sum(len(file.keys()) for file in files) != len(owners):
        raise FileFormatError(f"{folder.name}: a tensor stands in two shards")
    # Old Llama checkpoints store what config.json already says.
    return {name: file for name, file in owners.items() if not name.endswith("rotary_emb.inv_freq")}


def header_of(file: Any, name: str) -> Header:
    about = file.get_slice(name)
    return Header(tuple(about.get_shape()), about.get_dtype())


def _open_all(folder: Path, framework: Framework) -> list[Any]:
    index, single = folder / INDEX, (folder / SINGLE).exists()
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise FileFormatError(f"{INDEX} has no usable weight_map")
        names = sorted(set(weight_map.values()))
        if single and SINGLE not in names:  # saved again in one piece, which transformers reads: the index is left over
            return [_open(folder, SINGLE, framework)]
        files = {name: _open(folder, name, framework) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in files[name].keys():  # noqa: SIM118
                raise FileFormatError(f"{INDEX} places {shown(tensor)} in {name}, which does not hold it")
        return list(files.values())
    if single:
        return [_open(folder, SINGLE, framework)]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelNotFoundError(
            f"{folder.name} holds pickle weights (.bin, .pt), which can run code and are never loaded: "
            "convert them to safetensors"
        )
    raise ModelNotFoundError(f"{folder.name} has neither {SINGLE} nor {INDEX}")


def _open(folder: Path, name: str, framework: Framework) -> Any:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise FileFormatError(f"{INDEX} names {shown(name)}, which is not a safetensors file of its folder")
    if (folder / name).exists() and not (folder / name).is_file():
        raise FileFormatError(f"{name} is no file")
    try:
        return safe_open(folder / name, framework=framework)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{folder.name} has no {name}, which {INDEX} names") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(f"{name} is not a sound safetensors file: {error}") from None
