"""Memory: which precision a checkpoint gets, how many blocks fit, and the largest steps that are run to know it."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch

from ramify.config import CacheConfig, ModelDType
from ramify.device.layers import TorchLayers
from ramify.device.pool import KVPool, bytes_per_block
from ramify.device.rehearsal import NUM_BLOCKS, Largest, largest_plans
from ramify.device.sizing import GpuMemory, num_blocks
from ramify.device.step import DeviceStep
from ramify.engine.plan import BlockCopy
from ramify.errors import InvalidInputError, ModelError
from ramify.models.decoder import Decoder, parameters
from ramify.models.loader import choose_dtype
from tests.architectures import SMALL


@pytest.fixture
def decoder() -> Decoder:
    decoder = Decoder(SMALL, torch.float32, torch.device("cpu"))
    for _, parameter in parameters(decoder):
        parameter.normal_(0.0, 0.1)
    return decoder


@pytest.mark.parametrize(
    ("asked", "checkpoint", "device", "has_bfloat16", "dtype"),
    [
        ("auto", "float16", "cuda", True, torch.float16),
        ("auto", "half", "cuda", True, torch.float16),
        ("auto", "bfloat16", "cuda", True, torch.bfloat16),
        ("auto", "float32", "cuda", True, torch.bfloat16),
        ("auto", "float32", "cuda", False, torch.float16),
        ("auto", "bfloat16", "cuda", False, torch.float16),
        ("auto", "float8_e4m3fn", "cuda", True, torch.bfloat16),
        ("auto", "float16", "cpu", True, torch.float32),
        ("float32", "float16", "cuda", True, torch.float32),
        ("half", "bfloat16", "cpu", True, torch.float16),
    ],
)
def test_the_checkpoints_own_precision(
    *, asked: ModelDType, checkpoint: str, device: str, has_bfloat16: bool, dtype: torch.dtype
) -> None:
    assert choose_dtype(asked, checkpoint, device, has_bfloat16=has_bfloat16) is dtype


def test_what_is_left_becomes_blocks(decoder: Decoder) -> None:
    block = bytes_per_block(SMALL, 16, torch.float32)
    memory = GpuMemory(total=1000 * block, needed=300 * block, beside=100 * block)

    def count(share: float, max_num_seqs: int = 256) -> int:
        cache = CacheConfig(gpu_memory_utilization=share)
        sizes: dict[str, Any] = {"num_tracks": 1, "max_num_seqs": max_num_seqs, "max_model_len": 160}
        return num_blocks(cache, [decoder], **sizes, measure_gpus=lambda: {torch.device("cpu"): memory})

    assert count(0.9) == 500
    assert count(0.5) == 100
    assert count(0.9, max_num_seqs=2) == 20  # two sequences of ten blocks fill no more
    with pytest.raises(InvalidInputError, match=r"gpu_memory_utilization 0.4 of .* higher gpu_memory_utilization"):
        count(0.4)


def test_who_names_a_number_is_not_measured(decoder: Decoder) -> None:
    def refuse() -> dict[torch.device, GpuMemory]:
        raise AssertionError("measured")

    cache = CacheConfig(num_kv_blocks=7)
    sizes: dict[str, Any] = {"num_tracks": 1, "max_num_seqs": 1, "max_model_len": 16}
    assert num_blocks(cache, [decoder], **sizes, measure_gpus=refuse) == 7


@pytest.mark.parametrize(("num_models", "num_tracks"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tokens", [1, 5, 24, 100])
def test_the_largest_steps_are_large_and_allowed(num_models: int, num_tracks: int, tokens: int) -> None:
    largest = Largest(num_models, num_tracks, 8, 40, tokens, 4)
    plans = largest_plans(largest)
    sizes = [[sum(len(chunk.token_ids) for chunk in work.chunks) for work in plan.works] for plan in plans]
    assert all(sum(each) <= max(tokens, num_tracks) for each in sizes)
    assert max(max(each) for each in sizes) >= min(tokens // num_tracks, 40)
    for plan in plans:
        assert 1 <= len(plan.draws) <= 8
        chunks = [chunk for work in plan.works for chunk in work.chunks]
        assert all(chunk.end == 40 and len(chunk.block_table) == 10 for chunk in chunks)
        assert all(block < NUM_BLOCKS for chunk in chunks for block in chunk.block_table)
    decodes = [plan for plan in plans if all(len(chunk.token_ids) == 1 for chunk in plan.works[0].chunks)]
    assert max(len(plan.draws) for plan in decodes) == max(1, min(8, tokens // num_tracks))


def test_a_step_runs_them(decoder: Decoder) -> None:
    """The cache of a rehearsal is smaller than its contexts."""
    largest = Largest(1, 1, 8, NUM_BLOCKS * 4 + 50, 60, 4)
    pool = KVPool(SMALL, NUM_BLOCKS, 4, torch.float32, torch.device("cpu"))
    step = DeviceStep([TorchLayers(decoder, pool)], max_num_seqs=8)
    for plan in largest_plans(largest):
        result = step.launch(plan)()
        assert len(result.token_ids) == len(plan.draws)
        assert not result.faults


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="Linux alone has huge pages")
def test_a_first_token_need_not_clear_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy asks the system for them: 2 MB were cleared in every layer."""
    advised = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            advised.append(option)

    monkeypatch.setattr("ramify.device.pool.mmap.mmap", Memory)
    pool = KVPool(SMALL, 100, 16, torch.float32, torch.device("cpu"))
    assert advised == [mmap.MADV_NOHUGEPAGE]
    assert not pool.kv.any()
    pool.kv[:, 3] = 1.0
    assert pool.kv[:, 2:5].sum() == pool.kv[:, 3].numel()


def test_a_cache_that_no_system_has_is_refused() -> None:
    with pytest.raises(ModelError, match=r"GiB for the KV cache: num_kv_blocks"):
        KVPool(SMALL, 10**15, 16, torch.float32, torch.device("cpu"))


def test_blocks_on_their_way_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand siblings that forked inside a block, or a long context that was swapped out, took gigabytes beside a
    cache that is as large as memory allows. They go a few layers at a time, and arrive as if they went at once."""
    arch, taken = replace(SMALL, num_layers=5), []
    pool = KVPool(arch, 8, 4, torch.float32, torch.device("cpu"), num_host_blocks=4)
    pool.kv.normal_()
    before, select = pool.blocks.clone(), torch.Tensor.index_select

    def noted(self: torch.Tensor, *where: Any) -> torch.Tensor:
        content = select(self, *where)
        taken.append(content.nbytes)
        return content

    monkeypatch.setattr(torch.Tensor, "index_select", noted)
    most = 2 * 3 * bytes_per_block(SMALL, 4, torch.float32) // SMALL.num_layers  # of three blocks in two layers
    monkeypatch.setattr("ramify.device.pool.COPIED_AT_ONCE", most)
    pool.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(7, 0)])
    assert torch.equal(pool.blocks[:, :3], before[:, [7, 0, 1]])
    pool.swap_out([BlockCopy(0, 3), BlockCopy(1, 0), BlockCopy(2, 1)])
    pool.swap_in([BlockCopy(1, 4), BlockCopy(3, 5), BlockCopy(0, 6)])
    assert torch.equal(pool.blocks[:, 4:], before[:, [1, 7, 0, 7]])
    assert torch.equal(pool.blocks[:, 3], before[:, 3])
    assert max(taken) == most
