"""An engine that sleeps gives its memory back, and draws the same tokens when it is awake again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ramify import LLM, EngineAsleepError, InvalidInputError, SamplingParams, UnsupportedError, WeightsError
from ramify.device.memory_returned import PutAway
from ramify.device.step import DeviceStep
from ramify.drive.sleep import Sleeper
from tests.conftest import CheckpointMaker

PROMPTS = [list(range(1, 40)), [7, 8, 9]]
PARAMS = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=2)


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("qwen2")


def drawn(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(sample.token_ids, list(sample.logprobs or ())) for output in outputs for sample in output.outputs]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_engine_that_slept_draws_the_same(folder: Path, enforce_eager: bool) -> None:
    llm = LLM(str(folder), num_kv_blocks=64, enforce_eager=enforce_eager)
    tree = llm.tree()
    node = tree.root(PROMPTS[0])
    before, children = drawn(llm), tree.next_logprobs(node)
    llm.sleep()
    for call in (lambda: drawn(llm), llm.sleep, lambda: llm.logprobs([1], [[2]]), lambda: tree.sample(node)):
        with pytest.raises(EngineAsleepError, match="sleeps"):
            call()
    with pytest.raises(EngineAsleepError, match=r"wake_up\(\)"):
        llm.load_weights(load_file(folder / "model.safetensors").items())
    llm.wake_up()
    assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0, "nothing of the cache is left"
    llm.reset_prefix_cache()
    assert drawn(llm) == before
    assert torch.equal(tree.next_logprobs(node), children), "nodes are computed anew"
    llm.wake_up()  # awake already: nothing to do


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_weights_that_were_forgotten_must_be_loaded(folder: Path, enforce_eager: bool) -> None:
    """As a trainer does it: the weights' memory first, then the stream, then the cache."""
    llm = LLM(str(folder), num_kv_blocks=64, enforce_eager=enforce_eager)
    weights, before = load_file(folder / "model.safetensors"), drawn(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.load_weights(weights.items())
    with pytest.raises(EngineAsleepError, match="kv_cache"):
        drawn(llm)
    llm.wake_up(tags=["kv_cache"])
    assert drawn(llm) == before
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(WeightsError, match="sleep forgot them"):
        drawn(llm)
    llm.load_weights(weights.items())
    assert drawn(llm) == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_cache_gives_its_memory_back(folder: Path) -> None:
    llm = LLM(str(folder), num_kv_blocks=8_000)
    assert isinstance(llm.core.device, DeviceStep)
    kv: torch.Tensor = llm.core.device.lanes[0].layers.pool.kv  # type: ignore[attr-defined]
    kv.fill_(1.0)  # as if every block had been written
    full = resident_bytes()
    assert kv.nbytes > 50e6
    llm.sleep()
    assert full - resident_bytes() >= 0.9 * kv.nbytes
    llm.wake_up()
    assert len(drawn(llm)) == 4


@pytest.mark.parametrize("keep", [True, False])
def test_storages_are_emptied_and_come_back_under_all_their_views(keep: bool) -> None:
    whole = torch.arange(6000, dtype=torch.float32).view(60, 100)
    views, other = whole.unbind(0), torch.full((5,), 7, dtype=torch.bfloat16)
    away = PutAway([*views, other], keep=keep)
    assert away.num_bytes == 6000 * 4 + 10
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    away.bring_back()
    assert whole.untyped_storage().nbytes() == 24_000
    if keep:
        assert torch.equal(torch.stack(views), torch.arange(6000, dtype=torch.float32).view(60, 100))
        assert other.tolist() == [7] * 5


def test_what_cannot_sleep_says_why(folder: Path, default_gguf: Path) -> None:
    llm = LLM(str(folder), num_kv_blocks=64)
    with pytest.raises(InvalidInputError, match=r"level must be .*, got 3"):
        llm.sleep(level=3)
    with pytest.raises(InvalidInputError, match="tags must be one of"):
        llm.wake_up(tags=["everything"])  # type: ignore[list-item]
    assert drawn(llm), "and it is awake"
    quantised = LLM(str(default_gguf), num_kv_blocks=64)
    if quantised._decoder.quantised_formats:  # where there is no compiler, they are float32
        with pytest.raises(InvalidInputError, match="dequantize=True"):
            quantised.sleep(level=2)
        with pytest.raises(InvalidInputError, match="dequantize=True"):
            quantised.load_weights([])
    quantised.sleep()
    quantised.wake_up()
    with pytest.raises(UnsupportedError, match="tensor_parallel_size"):
        Sleeper(llm.core, llm._decoder, is_shared=True).sleep(1)
    with pytest.raises(UnsupportedError, match="draft model"):
        LLM(str(folder), num_kv_blocks=64, speculation=str(folder)).sleep()
    looked_up = LLM(str(folder), num_kv_blocks=64, speculation="ngram")
    looked_up.sleep()
    looked_up.wake_up()
    assert drawn(looked_up) == drawn(llm)
