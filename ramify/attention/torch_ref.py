"""Attention one chunk at a time with plain torch operators: slow, and the truth that other backends are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.slots import slots_of
from ramify.kv.pool import KVPool
from ramify.plan import Chunk, SharedPrefix


class TorchAttention:
    """Knows nothing of shared prefixes: every chunk reads all of its past."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: Sequence[Chunk] = ()
        self._slots: list[Tensor] = []
        self._pool: KVPool | None = None

    def prepare(self, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix], pool: KVPool) -> None:  # noqa: ARG002
        self._pool = pool
        self._chunks = chunks
        self._slots = [torch.from_numpy(slots_of(chunk, pool.block_size, 0)).to(self._device) for chunk in chunks]

    def forward(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self._pool is not None, "prepare comes first"
        written = [slots[chunk.start :] for slots, chunk in zip(self._slots, self._chunks, strict=True)]
        self._pool.write(layer, torch.cat(written), keys, values)
        outputs = []
        row = 0
        for slots, chunk in zip(self._slots, self._chunks, strict=True):
            count = len(chunk.token_ids)
            q = queries[row : row + count].transpose(0, 1)[None]  # (1, heads, count, head_dim)
            k, v = self._pool.kv[layer][slots].permute(1, 2, 0, 3)[:, None]  # (1, kv_heads, end, head_dim) each
            positions = torch.arange(chunk.start, chunk.end, device=self._device)
            mask = torch.arange(chunk.end, device=self._device) <= positions[:, None]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1).flatten(1))
            row += count
        return torch.cat(outputs)
