"""The file of measured forms: what it remembers, whose word counts, and what it does with files it cannot trust."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.form_cache import FormCache, parse_form, spell_form
from ramify.gpu.kernels.copied_product import CopiedTiles
from ramify.gpu.kernels.row_product import RowTiles
from ramify.gpu.kernels.row_stream import RowStream
from ramify.gpu.kernels.tile_stream import TileStream
from ramify.gpu.kernels.tiled_product import Tiles
from ramify.gpu.product_forms import Pace, Product, Vendor

MACHINE = {"chip": "a chip", "torch": "1", "triton": "2", "kernels": "3"}
QKV = Product("read", 6144, 4096, torch.bfloat16)
DOWN = Product("added", 4096, 14336, torch.bfloat16)
TILES = Tiles(64, 128, 4, 4, splits=3, rows=64)


def test_forms_outlive_the_process(tmp_path: Path) -> None:
    cache = FormCache(MACHINE, tmp_path / "new" / "folder")
    assert cache.find(QKV, 64) is None
    for rows, form in ((1, RowTiles(2, 1024, 4)), (64, TILES), (512, Vendor())):
        assert cache.keep(QKV, rows, form) == form
    again = FormCache(MACHINE, tmp_path / "new" / "folder")
    assert [again.find(QKV, rows) for rows in (1, 64, 512)] == [RowTiles(2, 1024, 4), TILES, Vendor()]
    assert again.find(QKV, 32) is None
    assert again.find(DOWN, 64) is None


@pytest.mark.parametrize("fact", list(MACHINE))
def test_another_machine_or_version_measures_for_itself(tmp_path: Path, fact: str) -> None:
    FormCache(MACHINE, tmp_path).keep(QKV, 64, TILES)
    assert FormCache({**MACHINE, fact: "other"}, tmp_path).find(QKV, 64) is None
    assert FormCache(MACHINE, tmp_path).find(QKV, 64) == TILES


def test_who_measured_first_has_decided(tmp_path: Path) -> None:
    """Two processes that began without a file, and measured different favourites."""
    one, other = FormCache(MACHINE, tmp_path), FormCache(MACHINE, tmp_path)
    assert one.keep(QKV, 64, TILES) == TILES
    assert other.keep(QKV, 64, Vendor()) == TILES
    assert other.find(QKV, 64) == TILES
    other.keep(DOWN, 64, Vendor())
    one.keep(DOWN, 32, Vendor())
    assert FormCache(MACHINE, tmp_path).find(DOWN, 64) == Vendor()
    assert FormCache(MACHINE, tmp_path).find(QKV, 64) == TILES


WRITER = """
import sys, torch
from pathlib import Path
from ramify.gpu.form_cache import FormCache
from ramify.gpu.product_forms import Product, Vendor
cache = FormCache({"chip": "a chip"}, Path(sys.argv[1]))
sys.stdin.readline()
for rows in range(int(sys.argv[2]), 40, 2):
    cache.keep(Product("head", 1000, 64, torch.float16), rows, Vendor())
"""


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(first)], stdin=subprocess.PIPE, env=environment)
        for first in (1, 2)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    cache = FormCache({"chip": "a chip"}, tmp_path)
    product = Product("head", 1000, 64, torch.float16)
    assert all(cache.find(product, rows) == Vendor() for rows in range(1, 40))


def stored(folder: Path) -> Path:
    FormCache(MACHINE, folder).keep(QKV, 64, TILES)
    return next(folder.glob("*.json"))


DAMAGED = {
    "empty": b"",
    "cut off": b'{"machine": {"chip": "a ch',
    "not text": b"\xff\xfe\x00",
    "another kind": b"[1, 2]",
    "nested": b"[" * 5000,
    "of another machine": b'{"machine": {"chip": "another"}, "forms": {}}',
    "without forms": json.dumps({"machine": MACHINE, "forms": 3}).encode(),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_a_damaged_or_foreign_file_is_written_anew(tmp_path: Path, name: str) -> None:
    path = stored(tmp_path)
    path.write_bytes(DAMAGED[name])
    cache = FormCache(MACHINE, tmp_path)
    assert cache.find(QKV, 64) is None
    cache.keep(DOWN, 8, TILES)
    assert FormCache(MACHINE, tmp_path).find(DOWN, 8) == TILES


@pytest.mark.parametrize(
    "change",
    [
        {"by": "magic"},
        {"by": ["tiles"]},
        {"outputs": 48},
        {"outputs": 0},
        {"outputs": 64.0},
        {"outputs": "64"},
        {"warps": True},
        {"stages": 1000},
        {"rows": 512},
        {"splits": -1},
        {"more": 1},
    ],
    ids=str,
)
def test_one_damaged_form_is_as_if_it_were_not_there(tmp_path: Path, change: dict[str, Any]) -> None:
    path = stored(tmp_path)
    FormCache(MACHINE, tmp_path).keep(DOWN, 8, Vendor())
    content = json.loads(path.read_text())
    content["forms"]["read 6144x4096 bfloat16, 64 rows"].update(change)
    path.write_text(json.dumps(content))
    cache = FormCache(MACHINE, tmp_path)
    assert cache.find(QKV, 64) is None
    assert cache.find(DOWN, 8) == Vendor()


def test_forms_are_spelled_and_read_alike() -> None:
    copied = CopiedTiles(64, 128, 4, 4, splits=2)
    streams = (RowStream(8, 1024, 5, 4, 2), TileStream(64, 128, 4, 4, splits=2, rows=64, programs=2))
    for form in (Vendor(), TILES, RowTiles(1, 4096, 8, 3), copied, *streams, Pace(0, 64, 1, 32)):
        assert parse_form(json.loads(json.dumps(spell_form(form)))) == form
    assert parse_form(None) is None
    assert parse_form({"by": "tiles", "outputs": 64}) is None


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_cannot_be_written_to_is_no_fault(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    cache = FormCache(MACHINE, tmp_path / "below")
    assert cache.keep(QKV, 64, TILES) == TILES
    assert cache.find(QKV, 64) == TILES


@pytest.mark.parametrize("place", ["a file", "a pipe", "a folder"])
def test_something_else_in_its_place_is_no_fault(tmp_path: Path, place: str) -> None:
    """Where the folder should be, or where the file should be."""
    if place == "a file":
        (tmp_path / "products").write_text("no folder")
        folder = tmp_path / "products"
    else:
        folder = tmp_path
        path = stored(folder)
        path.unlink()
        os.mkfifo(path) if place == "a pipe" else path.mkdir()
    cache = FormCache(MACHINE, folder)
    assert cache.keep(QKV, 64, TILES) == TILES
    assert cache.find(QKV, 64) == TILES


def test_nothing_is_stored_without_a_folder() -> None:
    cache = FormCache(MACHINE, None)
    assert cache.keep(QKV, 64, TILES) == TILES
    assert cache.find(QKV, 64) == TILES
