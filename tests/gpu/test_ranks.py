"""Ranks on GPUs, as far as one GPU goes: what graphs capture with one rank, and two processes that share a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify import LLM, OptimalSampling, SamplingParams
from ramify.device.captured_layers import CapturedLayers
from ramify.device.graphs import Shape
from ramify.device.layers import Batch
from ramify.device.pool import KVPool
from ramify.device.reads import Reads
from ramify.errors import InvalidInputError
from ramify.gpu.gpu_step import gpu_layers
from ramify.models.decoder import Decoder, parameters
from ramify.models.weights import fill
from ramify.parallel.group import NcclGroup
from tests.architectures import SMALL
from tests.conftest import CheckpointMaker
from tests.gpu.engines import OPTIONS, PROMPTS

ROWS = 4


class CountedRanks(NcclGroup):
    """Whatever is launched while a graph is captured."""

    captured: list[str]

    def add_up(self, part: Tensor) -> Tensor:
        self._count("sum")
        return super().add_up(part)

    def gather(self, part: Tensor, width: int) -> Tensor:
        self._count("gather")
        return super().gather(part, width)

    def _count(self, name: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.captured.append(name)


def test_collectives_are_captured_with_their_layer(tmp_path: Path) -> None:
    """One rank by NCCL: two sums a layer and one for the embedding in the graph of a step, a gather in that of its
    logits; replayed, they come to what a model without ranks comes to."""
    device = torch.device("cuda", 0)
    ones = np.ones(ROWS, np.int64)
    ranks = CountedRanks(tmp_path / "ranks", 0, 1)
    ranks.captured = []
    whole = Decoder(SMALL, torch.float32, device)
    torch.manual_seed(1)
    for _, parameter in parameters(whole):
        parameter.normal_(0.0, 0.1)
    shared = Decoder(SMALL, torch.float32, device, ranks=ranks)
    fill(shared, parameters(whole))
    tables = [(row,) for row in range(ROWS)]
    reads = Reads.of(np.arange(ROWS), ones, ones, tables, [], block_size=16, size=ROWS)
    told = []
    with torch.inference_mode():
        for decoder in (whole, shared):
            pool = KVPool(SMALL, 8, 16, torch.float32, device)
            layers = CapturedLayers(gpu_layers(decoder, pool, max_rows=8, max_model_len=64), 8)
            for step in range(3):  # run and captured, then replayed twice, with other tokens
                layers.prepare(reads)
                tokens = torch.arange(ROWS, device=device) + step
                slots = torch.arange(ROWS, device=device) * 16
                hidden = layers.forward(Batch(tokens, torch.zeros_like(tokens), slots))
                told.append(layers.logits(hidden).clone())
            assert set(layers.graphs.captured) == {Shape("decodes", 0, ROWS), Shape("logits", 0, ROWS)}
    assert ranks.captured == ["sum"] * (1 + 2 * SMALL.num_layers) + ["gather"]
    for one, other in zip(told[:3], told[3:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.fixture
def on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is given the first GPU. NCCL wants a different one for each: they talk by gloo, and nothing is
    captured of the model."""
    first = torch.device("cuda", 0)
    monkeypatch.setattr("ramify.parallel.start.rank_devices", lambda config: [first] * config.num_ranks)
    monkeypatch.setattr("ramify.drive.build.rank_devices", lambda _config: [])


@pytest.mark.usefixtures("on_one_gpu")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_processes_on_one_gpu_equal_one(make_checkpoint: CheckpointMaker, enforce_eager: bool) -> None:
    """In float32: tokens, and logprobs to the fourth digit; with prompts in pieces, siblings, prefixes and beams."""
    folder = str(make_checkpoint("qwen3", hidden_size=128, num_hidden_layers=2))
    options: dict[str, Any] = {**OPTIONS, "dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 16}
    params = [
        SamplingParams(n=4, seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(n=2, seed=2, max_tokens=12, top_p=0.9, logprobs=2, repetition_penalty=1.2),
        SamplingParams(strategy="beam_search", beam_width=3, n=2, max_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1),
    ]
    alone = LLM(folder, device="cuda", **options)
    shared = LLM(folder, device="cuda", tensor_parallel_size=2, enforce_eager=enforce_eager, **options)
    for each in params * 2:  # the second time from the prefix cache
        expected, found = (llm.generate(PROMPTS, each, use_tqdm=False) for llm in (alone, shared))
        for one, other in zip(found, expected, strict=True):
            assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
            for own, truth in zip(one.outputs, other.outputs, strict=True):
                assert own.cumulative_logprob == pytest.approx(truth.cumulative_logprob, abs=2e-3)


@pytest.mark.usefixtures("on_one_gpu")
def test_room_is_that_of_the_rank_with_the_least(make_checkpoint: CheckpointMaker) -> None:
    """Both measure; here both see one GPU, and each other on it."""
    folder = str(make_checkpoint("qwen3", hidden_size=128, num_hidden_layers=2))
    shared = LLM(
        folder,
        device="cuda",
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
    )
    assert shared.stats()["blocks_total"] > 0


@pytest.mark.usefixtures("on_one_gpu")
def test_a_shared_teacher_beside_a_student_on_the_cpu(make_checkpoint: CheckpointMaker) -> None:
    folders = [str(make_checkpoint("qwen3", hidden_size=128, num_hidden_layers=layers)) for layers in (2, 1)]
    options: dict[str, Any] = {**OPTIONS, "dtype": "float32", "max_num_seqs": 16}
    asked: dict[str, Any] = {"n": 3, "seed": 4, "max_tokens": 10, "use_tqdm": False}
    alone = OptimalSampling(*folders, device="cuda", **options).generate(PROMPTS, **asked)
    shared = OptimalSampling(*folders, devices=("cuda:0,cuda:1", "cpu"), **options).generate(PROMPTS, **asked)
    assert shared.generated_ids == alone.generated_ids


def test_more_ranks_than_gpus_are_refused(make_checkpoint: CheckpointMaker) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(InvalidInputError, match=rf"at most the number of GPUs \({count}\), got {2 * count}"):
        LLM(str(make_checkpoint("qwen3")), device="cuda", tensor_parallel_size=2 * count)
