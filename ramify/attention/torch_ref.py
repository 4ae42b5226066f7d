"""Attention with torch operators: the reference that every other backend is held to.

Single positions (decodes) attend together, padded to the longest of them; longer chunks one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kv.pool import KVPool
from ramify.plan import Chunk

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of the batch that attend together, the slots they look at, and which of those each may see."""

    rows: slice | Tensor
    slots: Tensor  # (B, longest)
    mask: Tensor  # (B, 1, queries, longest), True where a query may look


class TorchAttention:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[_Part] = []
        self._slots = torch.empty(0, dtype=torch.long)
        self._pool: KVPool | None = None

    def prepare(self, chunks: Sequence[Chunk], pool: KVPool) -> None:
        self._pool = pool
        all_slots = [_slots(chunk, pool.block_size) for chunk in chunks]
        written = [slots[chunk.start :] for slots, chunk in zip(all_slots, chunks, strict=True)]
        self._slots = self._tensor(np.concatenate(written))
        starts = np.cumsum([0] + [len(chunk.token_ids) for chunk in chunks])
        single = [index for index, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
        self._parts = []
        if single:
            rows = self._tensor(starts[single])
            self._parts.append(self._singles(rows, [all_slots[index] for index in single]))
        for index, chunk in enumerate(chunks):
            if len(chunk.token_ids) > 1:
                self._parts.append(self._chunk(chunk, int(starts[index]), all_slots[index]))

    def forward(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self._pool is not None, "prepare comes first"
        self._pool.write(layer, self._slots, keys, values)
        out = torch.empty_like(queries)
        for part in self._parts:
            count = part.slots.shape[0]
            q = queries[part.rows].view(count, -1, *queries.shape[1:]).transpose(1, 2)  # (B, heads, Q, head_dim)
            k = self._pool.keys[layer][part.slots].transpose(1, 2)  # (B, kv_heads, longest, head_dim)
            v = self._pool.values[layer][part.slots].transpose(1, 2)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=part.mask, enable_gqa=True)
            out[part.rows] = attended.transpose(1, 2).reshape(-1, *queries.shape[1:])
        return out.flatten(1)

    def _singles(self, rows: Tensor, slots: list[IntArray]) -> _Part:
        lengths = np.array([len(item) for item in slots])
        padded = np.zeros((len(slots), lengths.max()), dtype=np.int64)
        for row, item in zip(padded, slots, strict=True):
            row[: len(item)] = item
            row[len(item) :] = item[0]  # any slot that holds numbers: a masked NaN would still spread
        mask = np.arange(lengths.max()) < lengths[:, None]
        return _Part(rows, self._tensor(padded), self._tensor(mask)[:, None, None])

    def _chunk(self, chunk: Chunk, row: int, slots: IntArray) -> _Part:
        positions = torch.arange(chunk.start, chunk.end, device=self._device)
        mask = torch.arange(chunk.end, device=self._device) <= positions[:, None]
        return _Part(slice(row, row + len(chunk.token_ids)), self._tensor(slots)[None], mask[None, None])

    def _tensor(self, array: npt.NDArray[np.int64 | np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _slots(chunk: Chunk, block_size: int) -> IntArray:
    """The slot of every position of a chunk's track, 0 up to its end."""
    table = np.asarray(chunk.block_table, dtype=np.int64)
    positions = np.arange(chunk.end)
    slots: IntArray = table[positions // block_size] * block_size + positions % block_size
    return slots
