"""A teacher on the GPU and a student on the CPU, or both in lanes of their own on one GPU: what one device draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import LLM, OptimalSampling, SamplingParams
from ramify.device.crossing import CrossedLayers
from ramify.device.step import DeviceStep
from ramify.errors import InvalidInputError
from ramify.optimal import OptimalOutputs
from tests.conftest import CheckpointMaker

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 1024, "max_num_seqs": 32}
TEACHER = [[5, 6, 7], list(range(10, 150)), [9], list(range(10, 145))]
THETA = [list(range(10, 100)), [5, 6, 7], [9, 9], [3, 1] * 40]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"n": 6},
    "filtered": {"n": 4, "top_k": 30, "top_p": 0.9, "logprobs": 2},
    "controlled": {"n": 2, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
    "beams": {"temperature": 1.0, "strategy": "beam_search", "beam_width": 3, "n": 2, "seed": None},
}


@pytest.fixture(scope="module")
def folders(make_checkpoint: CheckpointMaker) -> tuple[Path, Path]:
    teacher = make_checkpoint("qwen3", hidden_size=128, num_hidden_layers=2)
    return teacher, make_checkpoint("qwen3", hidden_size=64, num_hidden_layers=1, num_attention_heads=2)


def outputs_of(made: OptimalSampling) -> dict[str, OptimalOutputs]:
    found = {}
    for kind, options in KINDS.items():
        found[kind] = made.generate(
            TEACHER, THETA, use_tqdm=False, **{"max_tokens": 24, "ignore_eos": kind != "beams", "seed": 3, **options}
        )
        assert not any(output.error for output in found[kind].outputs)
    assert made.stats()["engine"]["blocks_in_use"] == 0
    return found


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "devices", [(("cuda:0",), ("cpu",)), (("cpu",), ("cuda:0",)), (("cuda:0",), ("cuda:0",))], ids=str
)
def test_devices_draw_what_one_draws(folders: tuple[Path, Path], devices: Any, enforce_eager: bool) -> None:
    """The last has a lane of its own for the student, whose graphs are its own, as on a second GPU."""
    expected = outputs_of(OptimalSampling(*map(str, folders), device="cuda", **OPTIONS))
    apart = OptimalSampling(*map(str, folders), devices=devices, enforce_eager=enforce_eager, **OPTIONS)
    step = apart.core.device
    assert isinstance(step, DeviceStep)
    assert step.device.type == "cuda"
    assert [isinstance(lane.layers, CrossedLayers) for lane in step.lanes] == [
        devices[0] == ("cpu",),
        devices[0] != ("cpu",),
    ]
    assert step.runs_ahead == (("cpu",) not in devices)
    for kind, found in outputs_of(apart).items():
        assert found.generated_ids == expected[kind].generated_ids, kind
        for ours, theirs in zip(found.samples, expected[kind].samples, strict=True):
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=2e-3)
            for report, other in zip(ours.mixture or (), theirs.mixture or (), strict=True):
                assert report == pytest.approx(other, abs=1e-3)


def test_a_student_elsewhere_on_a_gpu_is_captured_there(folders: tuple[Path, Path]) -> None:
    apart = OptimalSampling(*map(str, folders), devices=("cuda:0", "cuda:0"), **OPTIONS)
    apart.generate(TEACHER, THETA, n=2, max_tokens=8, seed=1, ignore_eos=True, use_tqdm=False)
    step = apart.core.device
    assert isinstance(step, DeviceStep)
    captured = [key for lane in step.lanes for key in _graphs_of(lane.layers)]
    assert any(key.kind == "logits" for key in captured)
    assert any(key.kind == "decodes" for key in captured)


def _graphs_of(layers: Any) -> list[Any]:
    own: Any = layers._layers if isinstance(layers, CrossedLayers) else layers
    return list(own.graphs.captured)


def test_room_is_measured_on_each_device(folders: tuple[Path, Path]) -> None:
    """Without a number of blocks: the GPU's from a rehearsal, the CPU's from free memory, the smaller counts."""
    options = {name: value for name, value in OPTIONS.items() if name != "num_kv_blocks"}
    apart = OptimalSampling(*map(str, folders), devices=("cuda:0", "cpu"), gpu_memory_utilization=0.3, **options)
    told = apart.stats()
    assert told["teacher"]["blocks_total"] == told["theta"]["blocks_total"] > 0


def test_a_gpu_by_its_number(folders: tuple[Path, Path]) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=16, ignore_eos=True)
    options = {**OPTIONS, "warmup": "full", "max_num_seqs": 8}
    found = [LLM(str(folders[0]), device=name, **options).generate(TEACHER, params) for name in ("cuda:0", "cuda")]
    tokens = [[each.token_ids for output in outputs for each in output.outputs] for outputs in found]
    assert tokens[0] == tokens[1]
    with pytest.raises(InvalidInputError, match="GPUs"):
        LLM(str(folders[0]), device=f"cuda:{torch.cuda.device_count()}")
