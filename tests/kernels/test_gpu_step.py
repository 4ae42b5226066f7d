"""The GPU's whole step against the CPU path, on tiny float32 models: with graphs on a GPU, else in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import LLM, SamplingParams
from ramify.device.graphs import padded
from ramify.device.layers import TorchLayers
from ramify.device.pool import KVPool
from ramify.device.step import DeviceStep
from ramify.gpu.gpu_step import gpu_step
from ramify.models.decoder import Decoder
from ramify.outputs import RequestOutput
from tests.conftest import CheckpointMaker

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 12}
PROMPTS = [[5, 6, 7], list(range(10, 50)), list(range(10, 45)), [9]]


# The interpreter is slow: one family there, the one with most kernels' options in use, and tokens for a first step, one
# that is placed and two that just go on.
FAMILIES = ["llama", "qwen2", "qwen3"] if torch.cuda.is_available() else ["qwen3"]
MAX_TOKENS = 8 if torch.cuda.is_available() else 4


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, make_checkpoint: CheckpointMaker) -> Path:
    changes = {} if request.param == "qwen3" else {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_checkpoint(request.param, hidden_size=128, num_hidden_layers=2, **changes)


def engine(
    folder: Path, device: torch.device, *, runs_ahead: bool = True, logprobs_mode: Any = "raw", **options: Any
) -> LLM:
    """An engine whose device step has the GPU's layers and sampler wherever it runs."""
    is_eager = device.type == "cpu"  # the CPU's kernels would pack the weights, which the GPU's could not read
    options = {"enforce_eager": is_eager, "logprobs_mode": logprobs_mode, **OPTIONS, **options}
    llm = LLM(str(folder), device=device.type, **options)
    if device.type == "cpu":
        models = models_of(llm.core.device)
        llm.core.device = gpu_step(models, max_num_seqs=12, max_model_len=128, logprobs_mode=logprobs_mode)
    assert isinstance(llm.core.device, DeviceStep)
    llm.core.device.runs_ahead = runs_ahead
    return llm


def models_of(device: object) -> list[tuple[Decoder, KVPool]]:
    """What a device step on a CPU is made of."""
    assert isinstance(device, DeviceStep)
    models = []
    for lane in device.lanes:
        assert isinstance(lane.layers, TorchLayers)
        models.append((lane.layers.decoder, lane.layers.pool))
    return models


def generate(llm: LLM, **options: Any) -> list[list[tuple[int, ...]]]:
    outputs: list[RequestOutput] = llm.generate(PROMPTS, SamplingParams(**options), use_tqdm=False)
    assert not any(output.error for output in outputs)
    assert llm.stats()["blocks_in_use"] == 0
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": MAX_TOKENS},
    "sampled": {"n": 3, "seed": 3, "max_tokens": MAX_TOKENS},
    "filtered": {
        "n": 2,
        "seed": 4,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.01,
        "max_tokens": MAX_TOKENS,
    },
    "penalised": {"n": 2, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": MAX_TOKENS},
    "beams": {"strategy": "beam_search", "n": 3, "beam_width": 3, "max_tokens": MAX_TOKENS},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_equal_the_cpu_path(folder: Path, device: torch.device, kind: str) -> None:
    expected = generate(LLM(str(folder), device="cpu", **OPTIONS), **KINDS[kind])
    assert generate(engine(folder, device), **KINDS[kind]) == expected


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_reported_logprobs_equal_the_cpu_path(folder: Path, device: torch.device, mode: Any) -> None:
    params = SamplingParams(n=2, seed=6, logprobs=3, temperature=0.7, top_k=20, max_tokens=4)
    expected = LLM(str(folder), device="cpu", logprobs_mode=mode, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    llm = engine(folder, device, logprobs_mode=mode)
    for output, other in zip(llm.generate(PROMPTS, params, use_tqdm=False), expected, strict=True):
        for completion, wanted in zip(output.outputs, other.outputs, strict=True):
            assert completion.token_ids == wanted.token_ids
            assert completion.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
            assert completion.logprobs is not None
            assert wanted.logprobs is not None
            for row, wanted_row in zip(completion.logprobs, wanted.logprobs, strict=True):
                assert {token: entry.rank for token, entry in row.items()} == {
                    token: entry.rank for token, entry in wanted_row.items()
                }
                for token, entry in row.items():
                    assert entry.logprob == pytest.approx(wanted_row[token].logprob, abs=1e-4)


def test_prompts_in_pieces_are_reported_as_on_the_cpu(folder: Path, device: torch.device) -> None:
    """The host asks about a prompt's next piece before it has heard of the last."""
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    on_cpu = LLM(str(folder), device="cpu", **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    made = engine(folder, device, max_num_batched_tokens=16).generate(PROMPTS, params, use_tqdm=False)
    for output, expected in zip(made, on_cpu, strict=True):
        assert output.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(expected.prompt_logprobs)
        for row, wanted in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert row is not None
            assert wanted is not None
            assert row.keys() == wanted.keys()
            for token, entry in row.items():
                assert entry.logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


def test_running_ahead_changes_nothing(folder: Path, device: torch.device) -> None:
    plain = generate(engine(folder, device, runs_ahead=False), **KINDS["filtered"])
    assert generate(engine(folder, device), **KINDS["filtered"]) == plain


def test_kinds_may_be_mixed_in_a_batch(folder: Path, device: torch.device) -> None:
    params = [SamplingParams(**KINDS[kind]) for kind in ("greedy", "filtered", "beams", "penalised")]
    on_cpu = LLM(str(folder), device="cpu", **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    made = engine(folder, device).generate(PROMPTS, params, use_tqdm=False)
    for output, expected in zip(made, on_cpu, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [
            completion.token_ids for completion in expected.outputs
        ]


def test_graphs_are_few() -> None:
    assert [padded(count) for count in (1, 3, 5, 17, 65, 200, 257, 512)] == [1, 3, 8, 24, 80, 208, 288, 512]
    assert len({padded(count) for count in range(1, 513)}) == 33
