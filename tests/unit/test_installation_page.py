"""What docs/installation.md tells people to type is there to be typed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_extras_and_targets_exist() -> None:
    extras = re.findall(r'pip install (?:-e )?"\.\[(\w+)\]"', PAGE)
    assert extras == ["server", "dev", "notebooks"]
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {word for line in re.findall(r"[`$ ]make ([\w ]+)", PAGE) for word in line.split()}
    assert named >= {"demo", "serve", "test", "check", "clean"}
    assert {"demo", "serve", "test", "check", "clean"} <= set(targets)


def test_names_and_versions_are_the_projects() -> None:
    assert f"`{PROJECT['name']}`" in PAGE
    assert f"pip uninstall {PROJECT['name']}" in PAGE
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in PAGE
    assert "`torch>=2.11`" in PAGE
    assert "torch>=2.11" in PROJECT["dependencies"]
