"""Sleep on a GPU: nine tenths of weights and cache are free for others, and the same tokens come afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine, step_of, tokens

# 180 MB of weights and 270 MB of cache in bfloat16: what else an engine holds is small beside them.
WIDE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("qwen2", **WIDE)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_free_and_tokens_are_the_same(folder: Path, level: int, enforce_eager: bool) -> None:
    gc.collect()  # an engine before this one, among whose memory this one's weights would lie
    torch.cuda.empty_cache()
    llm = engine(folder, "bfloat16", enforce_eager=enforce_eager)
    before = tokens(llm, n=3, seed=4, max_tokens=24, top_p=0.9)
    llm.reset_prefix_cache()
    step = step_of(llm)
    held = llm._decoder.num_bytes + sum(lane.layers.pool.kv.nbytes for lane in step.lanes)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken_before = torch.cuda.memory_reserved()  # by this process: others may use the GPU meanwhile
    llm.sleep(level)
    assert taken_before - torch.cuda.memory_reserved() >= 0.9 * held
    assert not step.graphs.captured
    taken = torch.full((held // 2,), 7, dtype=torch.uint8, device="cuda")  # somebody else uses what is free
    del taken
    llm.wake_up()
    if level == 2:
        llm.load_weights(load_file(folder / "model.safetensors").items())
    for _ in range(2):  # the second time by graphs that were captured after the sleep
        assert tokens(llm, n=3, seed=4, max_tokens=24, top_p=0.9) == before
        llm.reset_prefix_cache()
    assert bool(step.graphs.captured) is not enforce_eager
