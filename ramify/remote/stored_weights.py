"""A stream of weights on its way to other processes: in files that all of them map, in the order in which they came."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ramify.errors import RamifyError, WeightsError

SHARD_BYTES = 2**30  # of this process's memory at a time


@contextmanager
def stored(weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """The folder of the files, for as long as somebody reads them. If the stream breaks off, nobody was told of it."""
    with tempfile.TemporaryDirectory(prefix="ramify-weights-") as folder:
        _store(weights, Path(folder))
        yield folder


def _store(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    shard: dict[str, Tensor] = {}
    names: set[str] = set()
    size = num_files = 0
    for name, tensor in weights:
        if name in names:
            raise WeightsError(f"{name} was given twice")
        shard[f"{len(names):08d} {name}"] = tensor.detach().to("cpu", copy=True).contiguous()
        names.add(name)
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            _save(shard, folder / f"{num_files:08d}.safetensors")
            shard, size, num_files = {}, 0, num_files + 1
    _save(shard, folder / f"{num_files:08d}.safetensors")


def _save(shard: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(shard, path)
    except (OSError, SafetensorError) as error:
        raise RamifyError(
            f"weights cannot be written to {path.parent}, from where the replicas read them ({error}): TMPDIR may name "
            "a place with more room"
        ) from None


def read_stored(folder: str) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in sorted(file.keys()):
                yield key.split(" ", 1)[1], file.get_tensor(key)
