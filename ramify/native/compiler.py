"""Compiles the kernels for the processor at hand, once: the library stays in the user's cache.

Its name is a digest of sources, flags and processor, so a change of any of them makes another library.
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
from collections.abc import Callable
from pathlib import Path

from ramify.errors import RamifyError
from ramify.models.embedded import cache_folder

# OpenMP's pragmas, but not its library: torch has brought one, and two would fight for the cores.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
SECONDS = 120  # far more than any machine needs


class NoCompilerError(RamifyError):
    """The kernels cannot be compiled or kept here; the message says why."""


def compiled(say: Callable[[str], None], architecture: str = "native") -> Path:
    """The library, made if the cache lacks it; the architecture is the compiler's name for a set of instructions."""
    if sys.platform != "linux":
        raise NoCompilerError("they are compiled on Linux only")
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    folder = _private_folder()
    target = folder / f"kernels-{_digest(sources, architecture)}.so"
    if target.exists():
        _check_private(target)
        return target
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompilerError("no C++ compiler (g++) was found")
    say("Compiling the CPU's kernels, once")
    try:
        with tempfile.TemporaryDirectory(prefix="compile-", dir=folder) as work:
            units = [path for path in sources if path.suffix == ".cpp"]
            _run([compiler, *FLAGS, f"-march={architecture}", "-c", *map(str, units)], work)
            objects = [f"{path.stem}.o" for path in units]
            _run([compiler, "-shared", *objects, "-o", target.name], work)
            Path(work, target.name).replace(target)  # atomic: another process sees the whole file or none
    except OSError as error:
        raise NoCompilerError(f"the library could not be stored in {folder}: {error.strerror or error}") from None
    return target


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoCompilerError(f"the compiler did not end within {SECONDS} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["nothing"]
        raise NoCompilerError(f"the compiler ended with {done.returncode} and said: {said[0]}")


def _digest(sources: list[Path], architecture: str) -> str:
    digest = hashlib.sha256(repr((FLAGS, architecture, _processor())).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What decides about instructions: a home folder may be shared by machines that differ."""
    facts = ("vendor_id", "cpu family", "model", "flags", "Features")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return platform.machine() + "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in facts}))


def _private_folder() -> Path:
    folder = cache_folder() / "native"
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise NoCompilerError(f"the cache {folder} cannot be made: {error.strerror or error}") from None
    _check_private(folder)
    return folder


def _check_private(path: Path) -> None:
    """Code is loaded from here: nobody else may have written it."""
    facts = path.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoCompilerError(f"{path} belongs to somebody else, or others may write to it")
