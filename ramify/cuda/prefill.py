"""Attention of prompts' chunks: every chunk sees its track's past and itself, all chunks of a step in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.slots import slots_of
from ramify.cuda.upload import upload
from ramify.kv.pool import KVPool
from ramify.plan import Chunk


class ChunkAttention:
    """Made once a step for its chunks; the keys and values of all of them are written before it is asked."""

    def __init__(self, chunks: Sequence[Chunk], pool: KVPool, device: torch.device) -> None:
        self._pool = pool
        self._chunks = chunks
        slots = [slots_of(chunk, pool.block_size, 0) for chunk in chunks]
        self._slots = upload(np.concatenate(slots), device)
        queries = [len(chunk.token_ids) for chunk in chunks]
        keys = [chunk.end for chunk in chunks]
        self._query_ends = _ends(queries, device)
        self._key_ends = _ends(keys, device)
        self._longest = max(queries), max(keys)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """queries (T, heads, head_dim) of all chunks, one after the other -> (T, heads * head_dim)."""
        seen = self._pool.kv[layer].index_select(0, self._slots)  # (keys, 2, kv_heads, head_dim)
        keys, values = seen[:, 0], seen[:, 1]
        if queries.device.type == "cuda" and queries.dtype is not torch.float32:
            attended: Tensor = torch.ops.aten._flash_attention_forward(
                queries,
                keys,
                values,
                self._query_ends,
                self._key_ends,
                *self._longest,
                0.0,  # dropout
                True,  # causal, aligned at the ends
                False,  # no debug mask
            )[0]
            return attended.flatten(1)
        return self._one_by_one(queries, keys, values)

    def _one_by_one(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """For precisions that the fast kernel does not know."""
        outputs, row, first = [], 0, 0
        for chunk in self._chunks:
            count = len(chunk.token_ids)
            q = queries[row : row + count].transpose(0, 1)[None]
            k, v = (x[first : first + chunk.end].transpose(0, 1)[None] for x in (keys, values))
            positions = torch.arange(chunk.start, chunk.end, device=queries.device)
            mask = torch.arange(chunk.end, device=queries.device) <= positions[:, None]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1).flatten(1))
            row, first = row + count, first + chunk.end
        return torch.cat(outputs)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return upload(np.cumsum([0, *counts], dtype=np.int32), device)
