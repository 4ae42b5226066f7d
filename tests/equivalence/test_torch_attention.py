"""TorchAttention against two slow references, one by chunk and one contiguous, on random steps of any shape."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.device.layers import _entered
from ramify.device.pool import KVPool
from ramify.device.reads import SharingRule, slots_between
from ramify.device.torch_attention import TorchAttention
from ramify.engine.plan import Chunk, SharedPrefix
from ramify.engine.sharing import best_sharing
from ramify.models.families import Architecture
from tests.architectures import SMALL
from tests.attention_truth import PlainAttention, reads_of

CPU = torch.device("cpu")


def _architecture(heads: int, kv_heads: int) -> Architecture:
    return replace(SMALL, num_layers=1, num_heads=heads, num_kv_heads=kv_heads)


def _step(numbers: random.Random, block_size: int, num_groups: int) -> list[Chunk]:
    """Chunks of tracks that share beginnings at random: decodes, prompts from nothing, prompts half-way."""
    free = list(range(400))
    numbers.shuffle(free)
    chunks = []
    for _ in range(num_groups):
        common = [free.pop() for _ in range(numbers.choice([0, 0, 2, 5]))]
        for _ in range(numbers.randint(1, 4)):
            past = len(common) * block_size + numbers.choice([0, 1, block_size, 2 * block_size + 1])
            count = numbers.choice([1, 1, 1, 3, 2 * block_size])
            if past == 0 and count == 1:
                count = 2
            own = -(-(past + count) // block_size) - len(common)
            table = (*common, *(free.pop() for _ in range(own)))
            chunks.append(Chunk([0] * count, past, table))
    numbers.shuffle(chunks)
    return chunks


@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 4, 16]),
    num_groups=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2, 6]),
)
@settings(max_examples=80, deadline=None)
def test_parts_equal_plain_equal_contiguous(seed: int, block_size: int, num_groups: int, kv_heads: int) -> None:
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    arch = _architecture(6, kv_heads)
    chunks = _step(numbers, block_size, num_groups)
    tables = [chunk.block_table[: chunk.start // block_size] for chunk in chunks]
    shared = [SharedPrefix(prefix.num_blocks, prefix.rows) for prefix in best_sharing(tables)]
    pools = [KVPool(arch, 400, block_size, torch.float32, CPU) for _ in range(2)]
    past = torch.randn_like(pools[0].kv)
    rows = sum(len(chunk.token_ids) for chunk in chunks)
    packed = torch.randn(rows, 6 + 2 * kv_heads, 16)
    queries, keys, values = packed[:, :6], packed[:, 6 : 6 + kv_heads], packed[:, 6 + kv_heads :]
    outputs = []
    backends: list[TorchAttention | PlainAttention] = [TorchAttention(), PlainAttention()]
    for pool, attention in zip(pools, backends, strict=True):
        pool.kv.copy_(past)
        outputs.append(_attend(attention, chunks, shared, pool, (queries, keys, values)))
    assert torch.equal(pools[0].kv, pools[1].kv)
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(outputs[1], _contiguous(chunks, pools[0], queries), atol=2e-6, rtol=1e-5)


def _attend(
    attention: TorchAttention | PlainAttention,
    chunks: Sequence[Chunk],
    shared: Sequence[SharedPrefix],
    pool: KVPool,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    size = pool.block_size
    attention.prepare(reads_of(chunks, shared, size, SharingRule(fewest_positions=32)), pool)
    slots = [slots_between(chunk.block_table, chunk.start, chunk.end, size) for chunk in chunks]
    pool.write(0, torch.from_numpy(np.concatenate(slots)), *qkv[1:])
    return attention.forward(0, *qkv)


def _contiguous(chunks: list[Chunk], pool: KVPool, queries: torch.Tensor) -> torch.Tensor:
    """Position by position, from keys and values laid out one after the other."""
    outputs = []
    row = 0
    for chunk in chunks:
        cache = torch.cat([pool.blocks[0, block] for block in chunk.block_table])  # (positions, 2, kv_heads, head_dim)
        for position in range(chunk.start, chunk.end):
            keys, values = cache[: position + 1].unbind(1)
            repeats = queries.shape[1] // keys.shape[1]
            scores = torch.einsum("hd,phd->hp", queries[row], keys.repeat_interleave(repeats, 1)) / 4.0
            outputs.append(
                torch.einsum("hp,phd->hd", scores.softmax(-1), values.repeat_interleave(repeats, 1)).flatten()
            )
            row += 1
    return torch.stack(outputs)


def test_a_shared_prefix_is_read_once() -> None:
    """Rows that share get different answers from different suffixes, and the merge is exact for extreme scores."""
    pool = KVPool(_architecture(2, 1), 16, 4, torch.float32, CPU)
    torch.manual_seed(0)
    pool.kv.normal_()
    pool.kv[0, :16, 0] *= 50.0  # the shared part outweighs the rest by many orders
    chunks = [Chunk([0], 18, (0, 1, 2, 3, own)) for own in (5, 6, 7)]
    queries, keys, values = torch.randn(3, 2, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    attention = TorchAttention()
    output = _attend(attention, chunks, [SharedPrefix(4, (0, 1, 2))], pool, (queries, keys, values))
    assert len(attention._parts) == 2
    torch.testing.assert_close(output, _contiguous(chunks, pool, queries), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32(dtype: torch.dtype) -> None:
    pool = KVPool(_architecture(6, 2), 400, 4, dtype, CPU)
    torch.manual_seed(0)
    pool.kv.normal_()
    chunks = [Chunk([0], 40, (*range(10), own)) for own in (20, 21, 22)]
    packed = torch.randn(3, 10, 16).to(dtype)
    queries, keys, values = packed[:, :6], packed[:, 6:8], packed[:, 8:]
    outputs = []
    for shared in ([SharedPrefix(10, (0, 1, 2))], []):
        outputs.append(_attend(TorchAttention(), chunks, shared, pool, (queries, keys, values)).float())
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-2, rtol=2e-2)


def test_nothing_left_behind_in_a_block_shows_through_a_mask() -> None:
    """A fault may leave NaN in a freed block; the next owner's tail must not see it."""
    pool = KVPool(_architecture(2, 1), 4, 4, torch.float32, CPU)
    pool.kv.fill_(torch.nan)
    chunks = (Chunk([0, 0], 0, (0,)), Chunk([0, 0, 0], 0, (1,)))
    pool.clear(_entered(reads_of(chunks, [], 4)))
    torch.manual_seed(0)
    attention = TorchAttention()
    _attend(attention, chunks, [], pool, (torch.randn(5, 2, 16), torch.randn(5, 1, 16), torch.randn(5, 1, 16)))
    decodes = [Chunk([0], 2, (0,)), Chunk([0], 3, (1,))]
    qkv = torch.randn(2, 2, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    assert _attend(attention, decodes, [], pool, qkv).isfinite().all()


def test_log_sum_exp_of_the_operator_is_what_we_take_it_for() -> None:
    query, keys = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 7, 16)
    output, scores = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, keys)
    exact = query @ keys.transpose(-1, -2) / 4.0
    torch.testing.assert_close(scores, exact.logsumexp(-1))
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, keys, keys))
