"""Attention one chunk at a time with plain torch operators: slow, and the truth that every device's is held to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ramify.device.pool import KVPool
from ramify.device.reads import Reads, SharingRule, slots_between
from ramify.engine.plan import Chunk, SharedPrefix

ALL_SHARED = SharingRule(fewest_positions=1)
NONE_SHARED = SharingRule(fewest_positions=10**9)


def reads_of(
    chunks: Sequence[Chunk], shared: Sequence[SharedPrefix], block_size: int, rule: SharingRule = ALL_SHARED
) -> Reads:
    """Chunk by chunk, as they come."""
    num_rows = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    return Reads.of(
        np.cumsum(num_rows) - num_rows,
        num_rows,
        np.array([chunk.start + 1 for chunk in chunks], np.int64),
        [chunk.block_table for chunk in chunks],
        rule.worthwhile(shared, num_rows, block_size),
        block_size=block_size,
        size=int(num_rows.sum()),
    )


def decode_reads(lengths: ArrayLike, shared: Sequence[SharedPrefix] = (), block_size: int = 16) -> Reads:
    """One row a chunk, each with so many positions to see; 0: padding. Whose blocks they are is not said."""
    ends = np.asarray(lengths, dtype=np.int64)
    rows = np.arange(len(ends))
    tables: list[tuple[int, ...]] = [()] * len(ends)
    return Reads.of(rows, np.ones_like(ends), ends, tables, shared, block_size=block_size, size=len(ends))


class PlainAttention:
    """Knows nothing of shared prefixes: every chunk reads all of its past."""

    def prepare(self, reads: Reads, pool: KVPool) -> None:
        self._reads, self._pool = reads, pool

    def forward(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # noqa: ARG002
        reads, output = self._reads, queries.new_empty(len(queries), queries[0].numel())
        for chunk, table in enumerate(reads.tables):
            first, count = int(reads.first_rows[chunk]), int(reads.num_rows[chunk])
            start = int(reads.ends[chunk]) - 1
            end = start + count
            slots = torch.from_numpy(slots_between(table, 0, end, reads.block_size))
            q = queries[first : first + count].transpose(0, 1)[None]  # (1, heads, count, head_dim)
            k, v = self._pool.kv[layer][slots].permute(1, 2, 0, 3)[:, None]  # (1, kv_heads, end, head_dim) each
            mask = torch.arange(end) <= torch.arange(start, end)[:, None]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            output[first : first + count] = attended[0].transpose(0, 1).flatten(1)
        return output
