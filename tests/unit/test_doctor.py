"""`ramify doctor` on machines that lack something: what it says, what it advises, how it ends."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ramify.cli import checkup
from ramify.cli.checkup import Finding
from ramify.cli.commands import app


def found() -> dict[str, Finding]:
    """By topic."""
    return {each.topic: each for each in checkup.findings(lambda _: None)}


def test_all_topics_and_what_will_be_used() -> None:
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert told.exit_code == 0, told.output
    parsed = json.loads(told.stdout.splitlines()[-1])
    topics = [each["topic"] for each in parsed["findings"]]
    assert topics[:4] == ["ramify", "Python", "PyTorch", "GPU"]
    assert {"processor", "CPU kernels", "memory", "cache", "default model"} < set(topics)
    assert "(device='auto')" in parsed["will_use"]


def test_every_line_stays_whole_where_it_is_piped() -> None:
    told = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "40"})
    lines = told.stdout.splitlines()
    assert any(line.startswith("ok Python: ") and str(sys.executable) in line for line in lines), told.stdout
    assert any(line.startswith("Models run on ") for line in lines)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path))  # where no earlier library lies
    monkeypatch.setattr(shutil, "which", lambda _: None)
    kernels = found()["CPU kernels"]
    assert kernels.state == "lacking"
    assert "no C++ compiler" in kernels.found
    assert kernels.advice is not None
    assert "apt install g++" in kernels.advice


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_CACHE", "/dev/null/ramify")
    topics = found()
    assert topics["cache"].state == "lacking"
    assert topics["cache"].advice is not None
    assert "RAMIFY_CACHE" in topics["cache"].advice
    assert topics["CPU kernels"].advice is not None
    assert "mend that" in topics["CPU kernels"].advice


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    server = found()["ramify serve, the playground"]
    assert server == Finding(server.topic, "lacking", "uvicorn not installed", 'pip install "ramify-llm[server]"')


def test_without_torch_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = CliRunner().invoke(app, ["doctor"])
    assert told.exit_code == 1
    assert "!! PyTorch: it cannot be imported" in told.stdout
    assert "Nothing runs until" in told.stdout
    assert CliRunner().invoke(app, ["doctor", "--json"]).exit_code == 1
