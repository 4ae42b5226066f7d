"""`ramify models info`: what a model is and needs, told from its files' headers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramify.cli import models
from ramify.cli.commands import app
from ramify.errors import RamifyError
from ramify.models import memory
from ramify.models.st_file import SafetensorsCheckpoint
from ramify.models.survey import survey_model
from tests.conftest import CheckpointMaker
from tests.quantised import write_model
from tests.quantised_folder import Scheme, write_quantised

SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}


def facts(model: Path | str) -> dict[str, Any]:
    shown = CliRunner().invoke(app, ["models", "info", str(model), "--json"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


@pytest.mark.parametrize(
    ("scheme", "held"),
    [
        (Scheme("gptq", group_size=32), 5.0),
        (Scheme("gptq", bits=8, desc_act=True), 8.25),
        (Scheme("awq"), 4.25),
        (Scheme("fp8", bits=8), 8.25),
        (None, 32.0),
    ],
    ids=["gptq4", "gptq8", "awq", "fp8", "float32"],
)
def test_a_folder(scheme: Scheme | None, held: float, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", **SHAPES)
    if scheme is not None:
        folder, _ = write_quantised(folder, tmp_path, scheme)
    told = facts(folder)
    expected = ("safetensors", None, None) if scheme is None else ("safetensors", scheme.method, scheme.bits)
    assert (told["format"], told["method"], told["bits"]) == expected
    shapes = SafetensorsCheckpoint(folder).shapes
    sizes = {name: shape[0] * (1 if len(shape) == 1 else shape[1]) for name, shape in shapes.items()}
    assert told["parameters"] == sum(sizes.values())
    inside = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    outside = 4 * (told["parameters"] - inside)
    assert told["weight_bytes"]["cpu"] == outside + inside * held / 8
    assert told["weight_bytes"]["cpu_dequantized"] == 4 * told["parameters"]
    assert told["kv_bytes_per_token"] == {"cpu": 2 * 2 * 2 * 32 * 4, "gpu": 2 * 2 * 2 * 32 * 2}
    assert told["here"]["cpu"]["fits"]


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_model(path, ["Q4_K", "Q6_K", "Q8_0"])
    told = facts(path)
    assert (told["format"], told["family"], told["layers"]) == ("GGUF", "llama", 2)
    assert set(told["quantization"].split(", ")) == {"Q4_K", "Q6_K", "Q8_0"}
    assert told["weight_bytes"]["gpu"] == 2 * told["parameters"]
    assert 4.5 < told["bits_per_weight"] < 8.6


def test_the_default_model_for_people(default_gguf: Path) -> None:
    shown = CliRunner().invoke(app, ["models", "info"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert default_gguf.name in shown.stdout
    assert "Q4_1" in shown.stdout
    assert "134.5 million parameters, 30 layers" in shown.stdout
    assert "fits" in shown.stdout


def test_what_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_model(path, ["Q8_0"])
    needed = survey_model(path).cpu_bytes + 250 * 10**6
    for total, free, words, status in (
        (needed - 1, needed - 1, "does not fit: it needs 2", 1),
        (needed, needed - 1, "not beside what runs now", 0),
        (needed + 1_000_000, needed + 1_000_000, "fits, with its whole context", 0),
        (needed + 9_000, needed + 9_000, "fits, with a context of 4 tokens", 0),
    ):
        monkeypatch.setattr(memory, "total_memory", lambda total=total: total)
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        shown = CliRunner().invoke(app, ["models", "info", str(path)], catch_exceptions=False)
        assert words in shown.stdout
        assert shown.exit_code == status


def test_a_gpu_is_told_of_too(monkeypatch: pytest.MonkeyPatch, make_checkpoint: CheckpointMaker) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: (70 * 10**9, 80 * 10**9))
    folder = make_checkpoint("llama", **SHAPES)
    told = facts(folder)["here"]["gpu"]
    assert told["fits"]
    assert told["tokens_at_most"] == (70 * 10**9 - told["needed"]) // 512
    assert "this GPU  fits" in CliRunner().invoke(app, ["models", "info", str(folder)]).stdout


@pytest.mark.parametrize("what", ["nothing/there.gguf", "no folder", "empty"])
def test_errors_are_ours(what: str, tmp_path: Path) -> None:
    if what == "empty":
        (tmp_path / what).mkdir()
    with pytest.raises(RamifyError):
        CliRunner().invoke(app, ["models", "info", str(tmp_path / what)], catch_exceptions=False)


def test_no_torch_is_needed(default_gguf: Path) -> None:
    program = (
        "import sys; from ramify.cli.commands import app\n"
        "try: app(['models', 'info', sys.argv[1]])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(default_gguf)], check=True, stdout=subprocess.DEVNULL)


def test_sizes_and_counts_for_people() -> None:
    assert [models._size(size) for size in (98 * 10**6, 10**9, 24_700_000_000)] == ["98 MB", "1.0 GB", "24.7 GB"]
    assert [models._count(count) for count in (134_500_000, 32_760_000_000)] == ["134.5 million", "32.8 billion"]
