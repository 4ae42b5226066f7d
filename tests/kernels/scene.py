"""A pool as an engine leaves it: scattered blocks, shared beginnings, NaN wherever nobody wrote. And attention in
float64 over gathered slots: what every kernel is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.engine.plan import SharedPrefix

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Scene:
    queries: Tensor  # (rows, heads, head_dim)
    kv: Tensor  # (slots, 2, kv_heads, head_dim)
    tables: Tensor  # int32 (rows, max_blocks)
    lengths: tuple[int, ...]
    shared: tuple[SharedPrefix, ...]
    block_size: int

    @property
    def queries_per_row(self) -> int:
        return self.queries.shape[1] // self.kv.shape[2]

    def attention(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(heads, head_dim) and (heads,), float64 on the CPU: what a row's query finds in positions start..end."""
        positions = torch.arange(start, end)
        table = self.tables[row].cpu().long()
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        seen = self.kv.cpu()[slots].double().repeat_interleave(self.queries_per_row, dim=2)
        keys, values = seen.permute(1, 2, 0, 3)  # (heads, positions, head_dim) each
        query = self.queries[row].cpu().double()
        scores = torch.einsum("hd,hpd->hp", query, keys) * query.shape[-1] ** -0.5
        return torch.einsum("hp,hpd->hd", scores.softmax(-1), values), scores.logsumexp(-1)

    def whole_attention(self) -> Tensor:
        """(rows, heads * head_dim), float64: zeros for rows that are padding."""
        outputs = [
            self.attention(row, 0, length)[0] if length else torch.zeros(self.queries.shape[1:], dtype=torch.float64)
            for row, length in enumerate(self.lengths)
        ]
        return torch.stack(outputs).flatten(1)


def make_scene(
    lengths: Sequence[int],
    shared: Sequence[SharedPrefix] = (),
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Scene:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    max_blocks = max(counts) + 2
    free = iter((torch.randperm(sum(counts) + 4, generator=generator) + 1).tolist())  # block 0 is never used
    tables = torch.zeros(len(lengths), max_blocks, dtype=torch.int32)  # what no position needs points at NaN
    for prefix in shared:
        tables[list(prefix.sharers), : prefix.num_blocks] = torch.tensor(
            [next(free) for _ in range(prefix.num_blocks)], dtype=torch.int32
        )
    num_shared = {row: prefix.num_blocks for prefix in shared for row in prefix.sharers}
    kv = torch.full(((sum(counts) + 5) * block_size, 2, kv_heads, head_dim), torch.nan)
    for row, length in enumerate(lengths):
        for index in range(num_shared.get(row, 0), counts[row]):
            tables[row, index] = next(free)
        positions = torch.arange(length)
        slots = tables[row].long()[positions // block_size] * block_size + positions % block_size
        kv[slots] = torch.randn(len(slots), 2, kv_heads, head_dim, generator=generator)
    # Larger than a model's queries: some positions must stand out, or every mistake is averaged away.
    queries = 2 * torch.randn(len(lengths), heads, head_dim, generator=generator)
    return Scene(
        queries.to(device, dtype), kv.to(device, dtype), tables.to(device), tuple(lengths), tuple(shared), block_size
    )
