"""GpuLayers against the plain decoder: every option of an architecture, every way of a product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ramify.device.layers import Batch
from ramify.device.pool import KVPool
from ramify.gpu.gpu_layers import GpuLayers
from ramify.models.decoder import Decoder, parameters
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
        layers._attend = lambda index, queries: queries.flatten(1)  # type: ignore[method-assign]  # noqa: ARG005
        hidden = layers.forward(Batch(token_ids, positions, slots))
        drawn_from = layers.logits(hidden)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    for layer, (keys, values) in zip(pool.kv, written, strict=True):
        torch.testing.assert_close(layer[slots, 0], keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer[slots, 1], values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drawn_from, decoder.logits(expected), atol=1e-3, rtol=1e-4)
    assert drawn_from.dtype is torch.float32
