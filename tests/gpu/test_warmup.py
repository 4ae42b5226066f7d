"""With warmup="full" no request captures a graph, whatever it asks for, and what is drawn is the same."""

from __future__ import annotations

import gc
from typing import Any

from ramify import OptimalSampling
from ramify.device.step import DeviceStep
from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine, step_of, tokens

ASKED: list[dict[str, Any]] = [
    {"seed": 1, "max_tokens": 12},
    {"n": 5, "seed": 2, "max_tokens": 12, "top_p": 0.8},
    {"n": 3, "seed": 3, "max_tokens": 12, "logprobs": 3, "repetition_penalty": 1.2},
    {"strategy": "beam_search", "beam_width": 4, "n": 2, "max_tokens": 12},
    {"seed": 4, "max_tokens": 12, "logit_bias": {5: 2.0}, "min_tokens": 4, "top_k": 9},
]

PAIR_PROMPTS = [[5, 6, 7], list(range(10, 80))]


def test_nothing_is_captured_after_the_start(make_checkpoint: CheckpointMaker) -> None:
    folder = make_checkpoint("llama")
    warm, lazy = engine(folder, "bfloat16", warmup="full"), engine(folder, "bfloat16")
    captured = dict(step_of(warm).graphs.captured)
    assert captured
    assert not step_of(lazy).graphs.captured
    for params in ASKED:
        assert tokens(warm, **params) == tokens(lazy, **params)
    # 700 shared positions and several samples: prefixes are read together
    long = [[7 * index % 90 + 5 for index in range(400)]]
    assert tokens(warm, long, n=8, seed=1, max_tokens=12) == tokens(lazy, long, n=8, seed=1, max_tokens=12)
    assert step_of(warm).graphs.captured.keys() == captured.keys()
    assert len(step_of(lazy).graphs.captured) < len(captured)


def test_a_pair_draws_the_same(make_checkpoint: CheckpointMaker) -> None:
    folders = [str(make_checkpoint("qwen3", hidden_size=size, num_hidden_layers=2)) for size in (128, 64)]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 512, "max_num_seqs": 12}
    warm, lazy = (OptimalSampling(*folders, device="cuda", warmup=way, **options) for way in ("full", "lazy"))
    step = warm.core.device
    assert isinstance(step, DeviceStep)
    captured = set(step.graphs.captured)
    assert captured
    for asked in ({"n": 3}, {"n": 2, "top_p": 0.8}, {"n": 2, "repetition_penalty": 1.3}, {"n": 5, "typical_p": 0.9}):
        one, other = (
            each.generate(PAIR_PROMPTS, PAIR_PROMPTS[::-1], seed=3, max_tokens=12, use_tqdm=False, **asked)
            for each in (warm, lazy)
        )
        assert one.generated_ids == other.generated_ids
    assert set(step.graphs.captured) == captured


def test_nothing_of_a_rehearsal_stays(make_checkpoint: CheckpointMaker) -> None:
    """Its buffers are gigabytes where vocabularies are large; they are free before the cache is made."""
    gc.collect()
    before = _num_steps()
    gc.disable()
    try:
        small = {"num_kv_blocks": None, "gpu_memory_utilization": 0.95, "max_num_seqs": 8, "max_model_len": 256}
        llm = engine(make_checkpoint("llama"), "bfloat16", warmup="full", **small)
        assert step_of(llm).graphs.captured
        assert _num_steps() == before + 1
    finally:
        gc.enable()


def _num_steps() -> int:
    return sum(type(each) is DeviceStep for each in gc.get_objects())
