"""One model's part of a step: chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.attention.base import Attention
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import BlockCopy, Chunk, Plan, Work


class Runner:
    def __init__(self, decoder: Decoder, pool: KVPool, attention: Attention) -> None:
        self.decoder = decoder
        self.pool = pool
        self.attention = attention

    @torch.inference_mode()
    def forward(self, plan: Plan | Work) -> Tensor:
        """Computes all chunks; returns the hidden states (tokens of the step, hidden), chunk by chunk."""
        move_blocks(self.pool, plan)
        if not plan.chunks:  # another model's step
            return torch.empty(0, self.decoder.arch.hidden_size, dtype=self.decoder.dtype, device=self.decoder.device)
        self.pool.clear([block for chunk in plan.chunks for block in _entered(chunk, self.pool.block_size)])
        token_ids: list[int] = []
        positions: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
        device = self.decoder.device
        self.attention.prepare(plan.chunks, plan.shared, self.pool)
        return self.decoder.forward(
            torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), self.attention.forward
        )

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Float32 logits (len(rows), vocabulary) after these rows of the step's tokens; rows ascend."""
        if len(rows) < hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, device=hidden.device)]
        return self.decoder.logits(hidden)


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
