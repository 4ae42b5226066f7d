"""One model's part of a step: chunks in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ramify.attention.base import Attention
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import BlockCopy, Chunk, Plan, Work


class Layers(Protocol):
    """What computes a decoder over a pool: torch's operators, or kernels of our own."""

    def hidden(self, work: Plan | Work, token_ids: Tensor, positions: Tensor, rows: Sequence[int]) -> Tensor:
        """token_ids, positions (T,), chunk by chunk -> hidden states after these rows (len(rows), hidden), ascending.

        They may be overwritten by the next call.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden) -> (R, vocabulary) float32."""


class TorchLayers:
    def __init__(self, decoder: Decoder, pool: KVPool, attention: Attention) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = attention

    def hidden(self, work: Plan | Work, token_ids: Tensor, positions: Tensor, rows: Sequence[int]) -> Tensor:
        self._pool.clear([block for chunk in work.chunks for block in _entered(chunk, self._pool.block_size)])
        self._attention.prepare(work.chunks, work.shared, self._pool)
        hidden = self._decoder.forward(token_ids, positions, self._attention.forward)
        return (
            hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, dtype=torch.long, device=hidden.device)]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class Runner:
    def __init__(self, decoder: Decoder, pool: KVPool, layers: Layers) -> None:
        self.decoder = decoder
        self.pool = pool
        self.layers = layers

    @torch.inference_mode()
    def forward(self, plan: Plan | Work, rows: Sequence[int]) -> Tensor:
        """Computes all chunks; returns the hidden states (len(rows), hidden) after these rows of the step's tokens."""
        move_blocks(self.pool, plan)
        decoder = self.decoder
        if not plan.chunks:  # another model's step
            return torch.empty(0, decoder.arch.hidden_size, dtype=decoder.dtype, device=decoder.device)
        token_ids: list[int] = []
        positions: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
        ids, places = (torch.tensor(numbers, device=decoder.device) for numbers in (token_ids, positions))
        return self.layers.hidden(plan, ids, places, rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden) -> (R, vocabulary) float32."""
        return self.layers.logits(hidden)


def move_blocks(pool: KVPool, plan: Plan | Work) -> None:
    """This order is the scheduler's promise: a block may be read by one of these and then be another's target."""
    pool.swap_out(_pairs(plan.swaps_out))
    pool.copy_blocks(_pairs(plan.copies))
    pool.swap_in(_pairs(plan.swaps_in))
    pool.copy_blocks(_pairs(plan.late_copies))


def _pairs(copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.target) for copy in copies]


def _entered(chunk: Chunk, block_size: int) -> tuple[int, ...]:
    """The block that a chunk enters at its beginning and leaves partly unwritten."""
    index = len(chunk.block_table) - 1
    return chunk.block_table[index:] if index * block_size >= chunk.start and chunk.end % block_size else ()
