"""The GPU's benchmark of two models runs, in miniature and without a GPU, and has the settings it is compared with."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SETTINGS = {"optimal32": (32, 512), "optimal16x512": (16, 512), "optimal16x1024": (16, 1024)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _loaded(monkeypatch, "gpu")


def _loaded(monkeypatch: pytest.MonkeyPatch, script: str) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    for name in ("gpu", "gpu_workloads", "gpu_peak", "pair_report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(f"{script}_bench", BENCH / f"{script}.py")
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


def test_the_peak_is_what_torch_and_all_others_take_together(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gib = 2**30
    statistics = {"mem_get_info": (20 * gib, 140 * gib), "memory_reserved": 110 * gib}
    statistics |= {"max_memory_reserved": 112 * gib, "max_memory_allocated": 90 * gib, "synchronize": None}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.Peak.since_begin(0.85) is None
    for name, value in {**statistics, "is_available": True}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    peak = gpu.Peak.since_begin(0.85)
    assert (peak.beside, peak.total) == (10 * gib, 140 * gib)
    assert peak.share == pytest.approx(122 / 140)
    gpu.tell([], {}, {"0.6B": peak, "1.5B": gpu.Peak.since_begin(0.9)})
    over, inside = capsys.readouterr().out.splitlines()
    assert over.startswith("0.6B: at most 122.0 of 140.0 GiB, 0.871 of the GPU, OUTSIDE the 0.85 allowed (tensors 90.0")
    assert ", inside the 0.9 allowed" in inside


def test_every_control_has_its_plain_twin(gpu: ModuleType) -> None:
    """The same prompts and outputs on the same model, but for the control."""
    twins = {name: each.twin for name, each in gpu.WORKLOADS.items() if each.twin is not None}
    assert {"penalties256", "bias256", "topp512", "beam64"} <= set(twins)
    for name, twin in twins.items():
        control, plain = gpu.WORKLOADS[name], gpu.WORKLOADS[twin]
        for field in ("model", "num_prompts", "lengths", "n", "outputs"):
            assert getattr(control, field) == getattr(plain, field), (name, field)


def test_a_pair_in_few_bits_is_counted(gpu: ModuleType) -> None:
    """A 32B teacher in 4 bits: 16.6 GB of layers, 3.1 of embedding and head."""
    spec = importlib.util.spec_from_file_location("few_bits", BENCH / "few_bits.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["gpu"] = gpu
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["gpu"]
    facts = {**module.COMMON, **module.TEACHER_32B}
    arch = module.architecture_from_config(facts | module.FORMS["gptq4"])
    assert arch.num_weights == 32_762_757_120  # its norms and biases are not counted
    assert module.weight_bytes(arch) == 2 * 2 * 152_064 * 5_120 + (arch.num_weights - 2 * 152_064 * 5_120) * 68 // 128
    assert module.weight_bytes(module.architecture_from_config(facts)) == 2 * arch.num_weights
    assert module.kv_bytes(arch) == 262_144


def test_drafts_are_right_as_often_as_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = _loaded(monkeypatch, "speculation")
    bench.main(["imposed", "--rehearse", "--repeats", "1", "--acceptance", "0.5", "--workload", "optimal16x512"])
    told = capsys.readouterr().out.splitlines()
    drawn, drafted = (
        int(count.replace(",", "")) for count in re.findall(r"([0-9,]+) of ([0-9,]+) drafted", told[1])[0]
    )
    assert 0.2 < drawn / drafted < 0.5  # of three, one half, one quarter and one eighth
