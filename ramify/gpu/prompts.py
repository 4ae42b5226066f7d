"""Attention of pieces of prompts: each sees its track's past and itself, many of a step in one call."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.device.pool import KVPool
from ramify.device.reads import Int64s, Reads, slots_between
from ramify.device.rows import upload

# Keys and values are gathered for so many positions at a time (a chunk that sees more is gathered by itself): many
# chunks with long pasts, as after hits in the prefix cache, would otherwise take more memory than the weights.
KEYS_AT_ONCE = 2**16


class PromptAttention:
    """Made once a step; the keys and values of all its rows are written before it is asked."""

    def __init__(self, reads: Reads, pool: KVPool) -> None:
        chosen = np.flatnonzero(reads.num_rows > 1)
        chosen = chosen[np.argsort(reads.first_rows[chosen])]
        keys = reads.ends[chosen] + reads.num_rows[chosen] - 1
        self._pieces = [_Piece(reads, chosen[piece], pool.kv.device) for piece in _pieces(keys)]

    def attend(self, queries: Tensor, kv: Tensor) -> Tensor:
        """queries (T, heads, head_dim), kv (slots, 2, kv_heads, head_dim) -> (T, heads * head_dim)."""
        if len(self._pieces) == 1:
            return self._pieces[0].attend(queries, kv)
        parts = torch.split(queries, [piece.num_rows for piece in self._pieces])
        return torch.cat([piece.attend(part, kv) for piece, part in zip(self._pieces, parts, strict=True)])


def _pieces(keys: Int64s) -> list[slice]:
    """Consecutive chunks that see at most KEYS_AT_ONCE positions together, or one that sees more."""
    pieces, start, total = [], 0, 0
    for index, count in enumerate(keys.tolist()):
        if index > start and total + count > KEYS_AT_ONCE:
            pieces.append(slice(start, index))
            start, total = index, 0
        total += count
    return [*pieces, slice(start, len(keys))]


class _Piece:
    """Some chunks, in the order of their rows."""

    def __init__(self, reads: Reads, chosen: Int64s, device: torch.device) -> None:
        self._queries: Int64s = reads.num_rows[chosen]
        self._keys: Int64s = reads.ends[chosen] + self._queries - 1
        self.num_rows = int(self._queries.sum())
        slots = [
            slots_between(reads.tables[chunk], 0, end, reads.block_size)
            for chunk, end in zip(chosen.tolist(), self._keys.tolist(), strict=True)
        ]
        self._slots = upload(np.concatenate(slots), device)
        self._query_ends, self._key_ends = (
            upload(np.cumsum([0, *counts], dtype=np.int32), device) for counts in (self._queries, self._keys)
        )

    def attend(self, queries: Tensor, kv: Tensor) -> Tensor:
        """queries (T, heads, head_dim), kv (slots, 2, kv_heads, head_dim) -> (T, heads * head_dim)."""
        seen = kv.index_select(0, self._slots)  # (keys, 2, kv_heads, head_dim)
        keys, values = seen[:, 0], seen[:, 1]
        if queries.device.type == "cuda" and queries.dtype is not torch.float32:
            attended: Tensor = torch.ops.aten._flash_attention_forward(
                queries,
                keys,
                values,
                self._query_ends,
                self._key_ends,
                int(self._queries.max()),
                int(self._keys.max()),
                0.0,  # dropout
                True,  # causal, aligned at the ends
                False,  # no debug mask
            )[0]
            return attended.flatten(1)
        return self._one_by_one(queries, keys, values)

    def _one_by_one(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """For precisions that the fast kernel does not know."""
        outputs, row, first = [], 0, 0
        for count, end in zip(self._queries.tolist(), self._keys.tolist(), strict=True):
            q = queries[row : row + count].transpose(0, 1)[None]
            k, v = (x[first : first + end].transpose(0, 1)[None] for x in (keys, values))
            positions = torch.arange(end - count, end, device=queries.device)
            mask = torch.arange(end, device=queries.device) <= positions[:, None]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1).flatten(1))
            row, first = row + count, first + end
        return torch.cat(outputs)
