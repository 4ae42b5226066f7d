"""Files that are written whole or not at all, and what is said where a disk has no room for them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ramify.errors import RamifyError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def reason(error: OSError, place: Path, needed: int | None = None) -> str:
    """Why a write failed. A full disk is named, with what is free and, where it is known, how many bytes are needed."""
    return no_room(place, needed) if is_full(error) else error.strerror or str(error)


def is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def no_room(place: Path, needed: int | None = None) -> str:
    needs = "" if needed is None else f"{shown_size(needed)} needed, "
    return f"no space is left on the disk of {place}: {needs}{shown_size(free_space(place))} free"


def free_space(place: Path) -> int:
    """Bytes that may still be written on the disk of a file or folder, which need not exist yet."""
    for folder in (place, *place.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0


def shown_size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def write_whole(path: Path, content: str) -> None:
    """Writes the whole file or, whatever happens meanwhile, leaves what was there."""
    unfinished = path.with_name(path.name + ".part")
    encoded = content.encode()
    with writing(path, len(encoded)), _removed_on_failure(unfinished):
        with unfinished.open("wb") as file:
            write_all(file.fileno(), encoded)
        unfinished.replace(path)


def write_new(path: Path, content: str) -> None:
    """Writes a file that was not there before, whole or not at all; one that is there stays as it is."""
    encoded = content.encode()
    with writing(path, len(encoded)):
        try:
            file = path.open("xb")
        except FileExistsError:
            raise RamifyError(f"{path} is there already, and nothing is overwritten: choose another name") from None
        with _removed_on_failure(path), file:
            write_all(file.fileno(), encoded)


def write_all(descriptor: int, content: bytes) -> None:
    """Returns when everything is on the disk; an OSError says that it may be there in part."""
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])
    os.fsync(descriptor)  # some disks say only now that they are full


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Around whatever writes a file: a failure is told with the file's name and its reason."""
    try:
        yield
    except OSError as error:
        raise RamifyError(f"cannot write {path}: {reason(error, path.parent, needed)}") from None


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
