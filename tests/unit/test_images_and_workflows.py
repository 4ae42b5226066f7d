"""Dockerfiles and workflows name commands, targets, files and flags that exist; release notes are the changelog's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ramify.cli.commands import app

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(ROOT.glob("Dockerfile*"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SYSTEM = {"apt-get", "docker", "gh", "grep", "mkdir", "chown", "pip", "rm", "useradd"}  # what those machines have


def instructions(path: Path) -> list[tuple[str, str]]:
    """Of a Dockerfile: each one's name and what follows, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def check_command(command: str) -> None:
    """One command of a shell: it exists, and so does what it names of ours."""
    words = command.split()
    if words[0] == "make":
        assert set(words[1:]) <= TARGETS, command
    elif words[0] == "ramify":
        check_ramify(words[1:])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), command
    elif words[0].startswith("."):
        assert os.access(ROOT / words[0], os.X_OK), command
    else:
        assert words[0] in SYSTEM, command
    for extra in re.findall(r"\.whl\)?\[(\w+)\]", command):
        assert extra in PROJECT["optional-dependencies"]
    if "--build-option=" in command:
        assert "--kernels" in command
        assert '("kernels", None' in (ROOT / "setup.py").read_text(encoding="utf-8")


def check_ramify(words: list[str]) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    flags = {flag for parameter in commands[words[0]].params for flag in parameter.opts}
    assert {word for word in words[1:] if word.startswith("-")} <= flags, words


def steps() -> list[dict[str, Any]]:
    parsed = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS]
    return [step for workflow in parsed for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_some() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cuda"]
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_is_there(path: Path) -> None:
    found = instructions(path)
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"}
    for rest in (rest for name, rest in found if name == "COPY" and not rest.startswith("--from")):
        assert set(rest.split()[:-1]) <= sent  # what is left out of the context cannot be copied
    assert all((ROOT / name).exists() for name in sent)
    for rest in (rest for name, rest in found if name == "RUN"):
        for command in rest.split("&&"):
            check_command(command.strip())
    last = dict(found)
    entry, arguments = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    assert entry == [next(iter(PROJECT["scripts"]))]
    check_ramify(arguments)
    assert last["USER"] != "root"
    assert last["EXPOSE"] == "8000"
    program = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])[-1]
    compile(program, "HEALTHCHECK", "exec")
    assert ":8000/health'" in program


def test_a_change_is_checked_as_here() -> None:
    commands = [command.strip() for step in steps() for command in step.get("run", "").splitlines()]
    assert ".ci/run" in commands
    for command in commands:
        check_command(command)
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in re.findall(r"^make .*$", run, re.MULTILINE):
        check_command(command)


def test_actions_have_versions() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used)


def _release_notes() -> Any:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / ".ci" / "release_notes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_release_notes_are_what_the_changelog_says_of_the_version() -> None:
    notes = _release_notes().notes
    changelog = (
        "# Changelog\n\n## 1.1 (unreleased)\n\nLater.\n\n## 1.0 (2026-01-31)\n\nFirst.\n\n## 0.9 (2025-12-01)\n\nOld.\n"
    )
    assert notes("v1.0", changelog, "1.0") == "First.\n"
    assert notes("v0.9", changelog, "0.9") == "Old.\n"
    for tag, version, why in (("v1.1", "1.1", "no date"), ("v1.0", "1.1", "tag says"), ("v2", "2", "nothing of 2")):
        with pytest.raises(SystemExit, match=why):
            notes(tag, changelog, version)
    assert _release_notes().HEADING.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


COMPLETE = """
import os, sys
from ramify.cli import main
try:
    main()
finally:
    print("loaded", *sorted({"torch", "numpy", "transformers", "ray"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("words", "expected"), [("ramify dis", ["distill"]), ("ramify generate --max-to", ["--max-tokens"])]
)
def test_a_shell_completes_commands_and_flags_without_what_is_heavy(words: str, expected: list[str]) -> None:
    """Every Tab starts a process: it must not import what takes a second."""
    asked = {"_RAMIFY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        cwd=ROOT,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    *completed, loaded = done.stdout.split("\n")[:-1]
    assert completed == expected, done.stderr
    assert loaded == "loaded"
