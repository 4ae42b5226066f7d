"""What an attention backend does: look at a step's chunks once, then attend layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ramify.kv.pool import KVPool
from ramify.plan import Chunk, SharedPrefix


class Attention(Protocol):
    def prepare(self, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix], pool: KVPool) -> None:
        """Called once per step, before the first layer; the tokens of the chunks lie one after the other."""

    def forward(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Writes keys and values (T, kv_heads, head_dim); returns what queries (T, heads, head_dim) attend to, flat."""
