"""What `make wheel` and `make dist` make: names, tags and contents, with a compiler that only pretends."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ramify.cpu.instructions import COMMON
from ramify.cpu.prebuilt import PLATFORM, file_name
from ramify.version import __version__

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
kind, options = sys.argv[1], sys.argv[2:]
getattr(build_meta, f"build_{kind}")("dist", {"--build-option": options})
"""
# Writes what it was told to make; what it was told stands beside it.
PRETENDED = """#!/bin/sh
echo "$@" >> "$COMMANDS"
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo library > "$2"; fi
  shift
done
"""

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="such wheels are made on Linux and x86-64"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout as far as a build needs it, so that nothing is left behind in this one."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path / "tree"
    shutil.copytree(ROOT / "ramify", folder / "ramify", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(tree: Path, kind: str, *options: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    dropped = ("PYTHONPATH", "MAKEFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"COMMANDS": str(tree / "commands")} | ({} if path is None else {"PATH": path})
    (tree / "dist").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", BUILD, kind, *options],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_wheel_with_kernels_and_one_without(tree: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(PRETENDED)
    compiler.chmod(0o755)
    done = build(tree, "wheel", "--kernels", path=f"{compiler.parent}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    wheel = tree / "dist" / f"ramify_llm-{__version__}-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        facts = archive.read(f"ramify_llm-{__version__}.dist-info/WHEEL").decode()
    assert {name for name in names if name.endswith(".so")} == {f"ramify/cpu/prebuilt/{file_name(e)}" for e in COMMON}
    assert {"ramify/cpu/threads.cpp", "ramify/cpu/older_glibc.h", "ramify/py.typed"} <= names
    assert "Root-Is-Purelib: false" in facts
    assert f"Tag: py3-none-{PLATFORM}" in facts
    commands = (tree / "commands").read_text().splitlines()
    for each in COMMON:
        assert any(set(each.options) < set(line.split()) and "older_glibc.h" in line for line in commands)
    # The same tree then makes a plain one: nothing was left that would come along.
    done = build(tree, "wheel")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tree / "dist" / f"ramify_llm-{__version__}-py3-none-any.whl") as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())


def test_without_a_compiler_the_reason_is_named(tree: Path) -> None:
    done = build(tree, "wheel", "--kernels", path="")
    assert done.returncode != 0
    assert "the CPU's kernels cannot be compiled: no C++ compiler (g++) was found" in done.stderr


def test_a_source_distribution_has_all_that_a_build_reads(tree: Path) -> None:
    done = build(tree, "sdist")
    assert done.returncode == 0, done.stderr
    folder = f"ramify_llm-{__version__}"
    with tarfile.open(tree / "dist" / f"{folder}.tar.gz") as archive:
        names = {name.removeprefix(f"{folder}/") for name in archive.getnames()}
    sources = {
        str(path.relative_to(tree)) for kind in ("cpp", "h", "py") for path in (tree / "ramify").rglob(f"*.{kind}")
    }
    assert sources | {"setup.py", "pyproject.toml", "LICENSE", "README.md", "ramify/playground/app.js"} <= names


def test_what_the_manifest_names_is_there() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    named = [
        name for line in lines if (found := re.match(r"(?:include|graft) (.*)", line)) for name in found[1].split()
    ]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
