"""Compiles the kernels for the processor at hand, once: the library stays in the user's cache.

Its name is a digest of sources, flags and processor, so a change of any of them makes another library. Code is loaded
from a folder that belongs to the user (or to the system's administrator) and that nobody else may write to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ramify.cpu.instructions import CPU_INFO, NATIVE, InstructionSet
from ramify.errors import RamifyError
from ramify.files import disk
from ramify.models.embedded import cache_folder

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread")
SECONDS = 120  # far more than any machine needs, while somebody waits for a model
SECONDS_OF_A_BUILD = 3600  # whoever makes a wheel can see that a busy machine takes its time
ROOM = 2_000_000  # bytes: the library, and what the compiler writes on its way
KEPT_DAYS = 60  # libraries of earlier versions and other processors


class NoCompilerError(RamifyError):
    """The kernels cannot be compiled or kept here; the message says why."""


@contextmanager
def compiled(say: Callable[[str], None], instructions: InstructionSet = NATIVE) -> Iterator[Path]:
    """The library, made if the cache lacks it; the path holds while the context is open."""
    if sys.platform != "linux":
        raise NoCompilerError("they are compiled on Linux only")
    try:
        sources = _sources()
        folder = cache_folder().resolve() / "native"
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        # What was checked is what is loaded, whoever may exchange folders above it: the open folder, not its name.
        opened = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        why = disk.no_room(cache_folder(), ROOM) if disk.is_full(error) else error
        raise NoCompilerError(f"there is no cache to keep them in: {why}") from None
    try:
        _check_private(os.fstat(opened), folder)
        path = Path(f"/proc/self/fd/{opened}") / f"kernels-{_digest(sources, instructions)}.so"
        if not path.exists():
            say("Compiling the CPU's kernels, once")
            compile_library(folder, path.name, instructions)
            with suppress(OSError):  # another process may be at it too
                _remove_old(folder)
        yield path
    finally:
        os.close(opened)


def compile_library(folder: Path, name: str, instructions: InstructionSet, *, for_other_machines: bool = False) -> None:
    """Makes the library in a folder that exists, whole or not at all."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompilerError("no C++ compiler (g++) was found")
    if disk.free_space(folder) < ROOM:
        raise NoCompilerError(disk.no_room(folder, ROOM))
    try:
        with tempfile.TemporaryDirectory(prefix="compile-", dir=folder) as work:
            units = [path for path in _sources() if path.suffix == ".cpp"]
            older = ("-include", str(HERE / "older_glibc.h")) if for_other_machines else ()
            seconds = SECONDS_OF_A_BUILD if for_other_machines else SECONDS
            _run([compiler, *FLAGS, *instructions.options, *older, "-c", *map(str, units)], work, seconds)
            _run([compiler, "-shared", "-s", *(f"{path.stem}.o" for path in units), "-o", name], work, seconds)
            Path(work, name).replace(folder / name)  # atomic: another process sees the whole file or none
    except OSError as error:
        raise NoCompilerError(f"the library could not be stored: {disk.reason(error, folder, ROOM)}") from None


def _run(command: list[str], folder: str, seconds: int) -> None:
    try:
        # What the compiler writes on its way lies beside the library: one disk must have room, not two.
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoCompilerError(f"the compiler did not end within {seconds} s") from None
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["nothing"]
        said = next((line for line in lines if "error" in line.lower()), lines[0])
        raise NoCompilerError(f"the compiler ended with {done.returncode} and said: {said}")


def _sources() -> list[Path]:
    return sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".h"))


def _digest(sources: list[Path], instructions: InstructionSet) -> str:
    digest = hashlib.sha256(repr((FLAGS, instructions.options, _processor())).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What decides about instructions: a home folder may be shared by machines that differ."""
    facts = ("vendor_id", "cpu family", "model", "flags", "Features")
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError as error:
        raise NoCompilerError(f"the processor is unknown: {error}") from None
    return platform.machine() + "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in facts}))


def _check_private(facts: os.stat_result, folder: Path) -> None:
    if facts.st_uid not in (os.getuid(), 0):
        raise NoCompilerError(f"{folder} belongs to another user: set RAMIFY_CACHE to a folder of your own")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoCompilerError(f"others may write to {folder}: remove it, and it is made anew")


def _remove_old(folder: Path) -> None:
    """What other versions left behind; a process that has loaded one keeps it."""
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for path in folder.iterdir():
        if path.name.startswith(("kernels-", "compile-")) and path.stat().st_mtime < oldest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
