"""Which form of a product was the fastest, and at which pace layers were, remembered: measured once per chip, shape,
precision and versions.

The file is in the user's cache, so that runs repeat and every process on a machine computes alike. Who measured first
has decided: a form that another process stored meanwhile is taken over. The file holds numbers that name tiles, never
code, and everything read from it is checked; one that is damaged, or not ours, is as if it were not there, and is
written anew. Without a folder that can be written to, forms are kept for this process alone.

    {"machine": {"chip": …, "torch": …, "triton": …, "kernels": …},
     "forms": {"read 6144x4096 bfloat16, 64 rows": {"by": "tiles", "outputs": 64, …}, …,
               "layers of …, 1 rows": {"by": "pace", "overlaps": 0, …}, …}}
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from ramify.errors import RamifyError
from ramify.files import disk
from ramify.files.json_file import parse_object, read_text
from ramify.gpu import product_candidates
from ramify.gpu.kernels import (
    activation,
    ahead,
    copied_product,
    norm,
    overlap,
    parts,
    row_product,
    row_stream,
    tile_stream,
    tiled_product,
)
from ramify.gpu.kernels.copied_product import CopiedTiles
from ramify.gpu.kernels.row_product import RowTiles
from ramify.gpu.kernels.row_stream import RowStream
from ramify.gpu.kernels.tile_stream import TileStream
from ramify.gpu.kernels.tiled_product import MOST_ROWS, Tiles
from ramify.gpu.product_forms import ALWAYS, NEVER, Form, Pace, Vendor
from ramify.models.embedded import cache_folder


class Named(Protocol):
    """What was measured: a product, or layers. Equal names, equal times."""

    @property
    def name(self) -> str: ...


Measured = Form | Pace

LARGEST = 2**20  # bytes: a few thousand forms
FORMS = {
    "cublas": Vendor,
    "tiles": Tiles,
    "copied": CopiedTiles,
    "row": RowTiles,
    "row stream": RowStream,
    "tile stream": TileStream,
}
KINDS: dict[str, type[Measured]] = {**FORMS, "pace": Pace}
# What a number of a form may be. All but those of ANY_NUMBER are powers of two.
LIMITS = {
    "outputs": (1, 512),
    "columns": (16, 8192),
    "stages": (1, 16),
    "warps": (1, 16),
    "splits": (1, 64),
    "programs": (1, 16),
    "overlaps": (0, 1),
    "stays_from": (ALWAYS, NEVER),
    "reads_early": (0, 1),
    "asks_ahead": (0, 64),
}
ROWS = (16, MOST_ROWS)
ANY_NUMBER = frozenset({"stages", "splits", "programs"})


def machine_of(device: torch.device) -> dict[str, str]:
    """All that a measured time depends on, beside the product itself."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "chip": f"{properties.name}, {properties.multi_processor_count} processors",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": _digest_of_kernels(),
    }


def forms_folder() -> Path:
    return cache_folder() / "products"


class FormCache:
    """Forms by product and rows, of one machine."""

    def __init__(self, machine: Mapping[str, str], folder: Path | None) -> None:
        self._machine = dict(machine)
        name = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:16]
        self._path = None if folder is None else folder / f"{name}.json"
        self._forms: dict[str, Measured] = self._stored()

    @classmethod
    def of(cls, device: torch.device) -> FormCache | None:
        """None where nothing can be timed: where kernels are interpreted."""
        return cls(machine_of(device), forms_folder()) if device.type == "cuda" else None

    def find(self, what: Named, rows: int) -> Measured | None:
        return self._forms.get(_key(what, rows))

    def keep(self, what: Named, rows: int, form: Measured) -> Measured:
        """Stores a form, unless another process has stored one already: returns the one that counts."""
        key = _key(what, rows)
        with self._alone():
            self._forms = {**self._forms, key: form, **self._stored()}
            self._store()
        return self._forms[key]

    def _stored(self) -> dict[str, Measured]:
        """What the file holds, as far as it can be understood."""
        if self._path is None:
            return {}
        try:
            content = parse_object(read_text(self._path, LARGEST), self._path.name)
        except RamifyError:
            return {}
        forms = content.get("forms")
        if content.get("machine") != self._machine or not isinstance(forms, dict):
            return {}
        read = {key: parse_form(told) for key, told in forms.items()}
        return {key: form for key, form in read.items() if form is not None}

    def _store(self) -> None:
        if self._path is None:
            return
        forms = {key: spell_form(form) for key, form in sorted(self._forms.items())}
        with suppress(RamifyError):  # a full or read-only disk: they are measured again next time
            disk.write_whole(self._path, json.dumps({"machine": self._machine, "forms": forms}, indent=1) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process reads and writes the file, where that can be had."""
        try:
            if self._path is None:
                raise OSError
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_suffix(".lock").open("ab")
        except OSError:
            yield
            return
        with lock:
            with suppress(OSError):  # some network disks know no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def spell_form(form: Measured) -> dict[str, Any]:
    by = next(name for name, kind in KINDS.items() if type(form) is kind)
    return {"by": by, **asdict(form)}


def parse_form(told: object) -> Measured | None:
    """A form as `spell_form` spells it; None for anything else."""
    if not isinstance(told, dict) or not isinstance(told.get("by"), str):
        return None
    kind = KINDS.get(told["by"])
    numbers = {name: value for name, value in told.items() if name != "by"}
    if kind is None or set(numbers) != {field.name for field in fields(kind)}:
        return None
    for name, value in numbers.items():
        least, most = ROWS if name == "rows" else LIMITS[name]
        if type(value) is not int or not least <= value <= most:
            return None
        if name not in ANY_NUMBER and value & (value - 1):
            return None
    form: Measured = kind(**numbers)
    return form


def _key(what: Named, rows: int) -> str:
    return f"{what.name}, {rows} rows"


def _digest_of_kernels() -> str:
    """Of what is timed: other sources may have other favourites."""
    digest = hashlib.sha256()
    sources = (
        activation,
        ahead,
        copied_product,
        norm,
        overlap,
        parts,
        row_product,
        row_stream,
        tile_stream,
        tiled_product,
    )
    for module in (*sources, product_candidates):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]
