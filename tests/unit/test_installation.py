"""An install says what it does, and a script beside a clone imports the package and not the clone's folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BUILD = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
SCRIPT = """
import site, sys
site.addsitedir(sys.argv[1])  # what pip would have put into site-packages
import ramify
print(ramify.__file__)
"""


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_beside_a_clone_imports_the_package(tmp_path: Path) -> None:
    """The clone's folder has the package's name, and Python takes a folder for a package if it finds nothing better."""
    pytest.importorskip("setuptools")
    clone = tmp_path / "beside" / "ramify"
    shutil.copytree(ROOT / "ramify", clone / "ramify", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    run(sys.executable, "-c", BUILD, str(tmp_path), cwd=clone)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = clone.parent / "script.py"
    script.write_text(SCRIPT)
    found = run(sys.executable, "-S", str(script), str(tmp_path / "site"), cwd=clone.parent)
    assert Path(found.strip()) == clone / "ramify" / "__init__.py"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_shows_what_pip_does_and_hands_its_options_on() -> None:
    shown = run("make", "--dry-run", "--always-make", "demo", "PIP_ARGS=--an-option", cwd=ROOT)
    [install] = [line for line in shown.splitlines() if " -m pip install " in line]
    assert "--quiet" not in install
    assert "--an-option" in install
    assert "5.5 GB" in shown
    assert "--seed 7" in shown  # the demo is the same for everybody


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_extras_are_installed_beside_the_environment_of_the_tests() -> None:
    """pip would else replace what the other tests run with, or fetch another torch."""
    shown = run(
        "make", "--no-print-directory", "--dry-run", "--always-make", "test-extras", "PIP_ARGS=--an-option", cwd=ROOT
    )
    [install] = [line for line in shown.splitlines() if " -m pip install " in line and "requirements.txt" in line]
    assert install.startswith(".venv-extras/bin/python ")
    assert "-c constraints.txt --an-option" in install
    assert ".venv-extras/bin/python -m pytest" in shown.splitlines()[-1]
