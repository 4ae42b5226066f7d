"""GpuLayers against the plain decoder: every option of an architecture, every way of a product."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ramify.device.layers import Batch
from ramify.device.pool import KVPool
from ramify.errors import UnsupportedModelError
from ramify.gpu.gpu_layers import GpuLayers
from ramify.models.decoder import Decoder, parameters
from ramify.models.weights import fill
from tests.architectures import SMALL

ARCHITECTURES = {
    "plain": SMALL,
    "qkv bias": replace(SMALL, qkv_bias=True),
    "every bias": replace(SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
    "normed heads, tied": replace(SMALL, qk_norm=True, tie_embeddings=True),
}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("tokens", [1, 3, 20, 70], ids="{} rows".format)  # one row, few, more, cuBLAS on a GPU
def test_hidden_states_cache_and_logits(name: str, tokens: int, device: torch.device) -> None:
    """Attention is left out: each token takes its own queries for what it attended to."""
    arch = ARCHITECTURES[name]
    decoder = Decoder(arch, torch.float32, device)
    torch.manual_seed(tokens)
    for _, parameter in parameters(decoder):
        parameter.normal_(0.0, 0.3)
    token_ids = torch.randint(arch.vocab_size, (tokens,), device=device)
    positions = torch.arange(tokens, device=device) * 3
    slots = torch.randperm(80, device=device)[:tokens]
    pool = KVPool(arch, 5, 16, torch.float32, device)
    written: list[tuple[Tensor, Tensor]] = []

    def keep(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        written.append((keys, values))
        return queries.flatten(1)

    expected = decoder.forward(token_ids, positions, keep)
    with torch.inference_mode():
        layers = GpuLayers(decoder, pool, max_rows=72, max_model_len=64)
        layers._attend = lambda index, queries, pace: queries.flatten(1)  # type: ignore[method-assign]  # noqa: ARG005
        hidden = layers.forward(Batch(token_ids, positions, slots))
        drawn_from = layers.logits(hidden)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    for layer, (keys, values) in zip(pool.kv, written, strict=True):
        torch.testing.assert_close(layer[slots, 0], keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer[slots, 1], values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drawn_from, decoder.logits(expected), atol=1e-3, rtol=1e-4)
    assert drawn_from.dtype is torch.float32


class Baton:
    """Ranks as threads, of which one computes at a time: the interpreter knows one program at a time."""

    def __init__(self, size: int) -> None:
        self.lock, self.barrier, self.parts = threading.Lock(), threading.Barrier(size), [torch.empty(0)] * size

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        """What every rank hands in, in their order."""
        self.parts[rank] = part.clone()
        self.lock.release()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()  # before anybody hands in again
        self.lock.acquire()
        return parts


class BatonRank:
    def __init__(self, baton: Baton, rank: int, size: int) -> None:
        self.rank, self.size, self.num_sums, self._baton = rank, size, 0, baton

    def add_up(self, part: Tensor) -> Tensor:
        self.num_sums += 1
        return part.copy_(torch.stack(self._baton.exchange(self.rank, part)).sum(0))

    def gather(self, part: Tensor, width: int) -> Tensor:
        gathered = torch.cat(self._baton.exchange(self.rank, part), dim=1)
        assert gathered.shape[1] == width
        return gathered


@pytest.mark.parametrize(("name", "tokens"), [("every bias", 1), ("normed heads, tied", 3)])
def test_ranks_come_to_what_one_rank_comes_to(name: str, tokens: int, device: torch.device) -> None:
    """Heads, MLP and vocabulary shared by two; two sums a layer, and one for the embedding."""
    arch = ARCHITECTURES[name]
    whole = Decoder(arch, torch.float32, device)
    torch.manual_seed(tokens)
    for _, parameter in parameters(whole):
        parameter.normal_(0.0, 0.3)
    batch = Batch(
        torch.randint(arch.vocab_size, (tokens,), device=device),
        torch.arange(tokens, device=device) * 3,
        torch.randperm(80, device=device)[:tokens],
    )
    baton = Baton(2)

    def computed(decoder: Decoder) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            pool = KVPool(decoder.arch, 5, 16, torch.float32, device)
            layers = GpuLayers(decoder, pool, max_rows=72, max_model_len=64)
            layers._attend = lambda index, queries, pace: queries.flatten(1)  # type: ignore[method-assign]  # noqa: ARG005
            hidden = layers.forward(batch)
            return hidden, layers.logits(hidden)

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        ranks = BatonRank(baton, rank, 2)
        decoder = Decoder(arch, torch.float32, device, ranks=ranks)
        with baton.lock:
            fill(decoder, ((each, decoder.shard.cut(each, tensor)) for each, tensor in parameters(whole)))
            told = computed(decoder)
        assert ranks.num_sums == 1 + 2 * arch.num_layers
        return told

    expected = computed(whole)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(of_rank, range(2)))
    torch.testing.assert_close(found[0][0], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0][1], expected[1], atol=1e-3, rtol=1e-4)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("head_dim", [8, 96, 100, 512])
def test_heads_without_tiles_are_refused(head_dim: int, device: torch.device) -> None:
    """By name, and not by the compiler in the first step."""
    arch = replace(SMALL, head_dim=head_dim)
    decoder = Decoder(arch, torch.float32, device)
    with pytest.raises(UnsupportedModelError, match=f"16, 32, 64, 128, 256 dimensions; this model's have {head_dim}"):
        GpuLayers(decoder, KVPool(arch, 2, 16, torch.float32, device), max_rows=4, max_model_len=32)
