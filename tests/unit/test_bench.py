"""The GPU's benchmark of two models runs, in miniature and without a GPU, and has the settings it is compared with."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SETTINGS = {"optimal32": (32, 512), "optimal16x512": (16, 512), "optimal16x1024": (16, 1024)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    for name in ("gpu_workloads", "pair_report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("gpu_bench", BENCH / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fifth_documents_settings_are_workloads(gpu: ModuleType) -> None:
    document = (BENCH.parent / "tests" / "documents" / "5-optimal-sampling.md").read_text(encoding="utf-8")
    for name, (batch, max_tokens) in SETTINGS.items():
        workload = gpu.WORKLOADS[name]
        assert (workload.model, workload.num_prompts, workload.outputs) == ("3B+1.5B", batch, (max_tokens, max_tokens))
        speed, seconds = sys.modules["pair_report"].PUBLISHED[batch, max_tokens]
        published = [line for line in document.splitlines() if f"| {batch} | {max_tokens} |" in line]
        assert len(published) == 1
        assert f"{speed}" in published[0]
        assert f"{seconds:.2f}s" in published[0]


def test_two_models_are_told_in_the_documents_columns(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--rehearse", "--repeats", "1", "--workloads", "optimal16x512"])
    lines = capsys.readouterr().out.splitlines()
    heads, row = (next(line for line in lines if line.startswith(start)) for start in ("| setting", "| optimal16x512"))
    told = dict(zip(heads.split(" | "), row.split(" | "), strict=True))
    assert {"throughput", "latency", "success", "memory", "published |"} <= set(told)
    assert told["success"] == "100%"
    assert told["published |"].strip(" |") == "", "a rehearsal is compared with nothing"
    result = json.loads(lines[-1])["pairs"]["optimal16x512"]
    assert result["tokens_per_second"] * result["seconds"] == pytest.approx(16 * 32, rel=0.02)
    assert 0 < result["latency"] <= result["seconds"]


def test_without_a_gpu_it_says_what_can_be_run(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in ((["--repeats", "0"], "at least 1"), (["--rehearse", "--save", "x"], "not worth saving")):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert why in capsys.readouterr().err
