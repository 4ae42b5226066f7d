"""batch_invariant by the GPU's whole step, on a tiny float32 model: a request's bits alone and in a busy schedule.

In the interpreter this proves the orders in which the kernels sum; that the matrix units keep to them is proven on a
GPU alone (tests/gpu/test_bits.py).
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ramify import LLM, SamplingParams
from ramify.device.pool import KVPool
from ramify.errors import UnsupportedError
from ramify.gpu import gpu_layers
from ramify.gpu.gpu_layers import GpuLayers
from ramify.gpu.gpu_step import gpu_step
from ramify.gpu.kernels.stretches import PositionCuts
from ramify.models.decoder import Decoder
from tests import bits
from tests.architectures import SMALL
from tests.conftest import CheckpointMaker
from tests.kernels.test_gpu_step import models_of

MAX_MODEL_LEN, MAX_NUM_SEQS = 128, 8
SHARED = list(range(10, 80))


def asked(prompt: list[int], **params: object) -> bits.Asked:
    return bits.Asked(prompt, SamplingParams(ignore_eos=True, **params))  # type: ignore[arg-type]


FEW = [
    asked([*SHARED[:44], 7], n=2, seed=1, max_tokens=5, logprobs=1),
    asked([*SHARED[:44], 9], seed=3, max_tokens=5),
]
MORE = [
    asked([*SHARED, 7, 8], n=3, seed=1, max_tokens=12, logprobs=2),
    asked(SHARED[:40], seed=2, max_tokens=20, temperature=0.7, top_k=20, top_p=0.8),
    asked([*SHARED, 9], seed=3, max_tokens=12, repetition_penalty=1.3, prompt_logprobs=1),
    asked(SHARED[:50], strategy="beam_search", beam_width=2, n=2, max_tokens=4),
]


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("qwen3", num_hidden_layers=1)


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts within the few positions of these tests."""
    monkeypatch.setattr(gpu_layers, "PositionCuts", partial(PositionCuts, lengths=((32, 64), (64, 2**40))))


def engine(folder: Path, device: torch.device, *, num_kv_blocks: int = 64, batched_tokens: int | None = None) -> LLM:
    on_gpu = device.type == "cuda"
    llm = LLM(
        str(folder),
        device=device.type,
        dtype="float32",
        batch_invariant=on_gpu,
        enforce_eager=not on_gpu,  # the CPU's kernels keep no weights that these can read
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=batched_tokens,
    )
    if not on_gpu:
        llm.core.device = gpu_step(
            models_of(llm.core.device),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            batch_invariant=True,
        )
    for lane in llm.core.device.lanes:  # type: ignore[attr-defined]
        assert isinstance(lane.layers, GpuLayers)
        lane.layers.sharing = replace(lane.layers.sharing, fewest_positions=1)
    return llm


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize(
    ("requests", "blocks", "batched_tokens"),
    [(FEW, 5, 24), pytest.param(MORE, 10, 48, marks=pytest.mark.long)],
    ids=["few", "more"],
)
def test_a_request_alone_and_in_a_busy_schedule(
    folder: Path, device: torch.device, requests: list[bits.Asked], blocks: int, batched_tokens: int
) -> None:
    """Prompts in pieces, beginnings found in the cache and read together, outputs computed again as prompts."""
    alone = bits.told_alone(engine(folder, device), requests)
    busy = engine(folder, device, batched_tokens=batched_tokens, num_kv_blocks=blocks)
    bits.check(alone, bits.told_together(busy, requests, random.Random(0)), requests)
    assert busy.stats()["preemptions"] > 0


@pytest.mark.usefixtures("short_stretches")
def test_prompts_are_told_of_in_the_same_bits(folder: Path, device: torch.device) -> None:
    """By kernels, beside others that ask for more alternatives, or for fewer."""
    requests = [
        asked(SHARED[:7], seed=1, max_tokens=1, prompt_logprobs=2),
        asked(SHARED[:9], seed=2, max_tokens=1, prompt_logprobs=0),
        asked(SHARED[3:8], seed=3, max_tokens=1, prompt_logprobs=9),
    ]
    llm = engine(folder, device)
    alone = bits.told_alone(llm, requests)
    llm.reset_prefix_cache()
    bits.check(alone, bits.told_together(llm, requests, random.Random(0)), requests)
    assert all(len(told[0]) == len(each.prompt) for told, each in zip(alone, requests, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 40, "num_kv_heads": 2}, "up to 16 query heads for each key-value head in float32.* has 20"),
        ({"hidden_size": 40}, "a hidden size that is a multiple of 16; this model's is 40"),
    ],
)
def test_what_has_no_exact_kernels_is_refused(device: torch.device, changes: dict[str, int], message: str) -> None:
    arch = replace(SMALL, **changes)  # type: ignore[arg-type]
    decoder = Decoder(arch, torch.float32, device)
    pool = KVPool(arch, 2, 16, torch.float32, device)
    with pytest.raises(UnsupportedError, match=message):
        GpuLayers(decoder, pool, max_rows=4, max_model_len=32, batch_invariant=True)
