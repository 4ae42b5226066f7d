"""One model's part of a step: chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.attention.base import Attention
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import BlockCopy, Chunk, Plan


class Runner:
    def __init__(self, decoder: Decoder, pool: KVPool, attention: Attention) -> None:
        self.decoder = decoder
        self.pool = pool
        self.attention = attention

    @torch.inference_mode()
    def run(self, plan: Plan, drawn: Sequence[int]) -> Tensor:
        """Computes all chunks; returns float32 logits (len(drawn), vocabulary) after the last tokens of those drawn."""
        self._move_blocks(plan)
        token_ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            last_rows.append(len(token_ids) - 1)
        device = self.decoder.device
        self.attention.prepare(plan.chunks, plan.shared, self.pool)
        hidden = self.decoder.forward(
            torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), self.attention.forward
        )
        if not drawn:
            return torch.empty(0, self.decoder.arch.vocab_size, device=device)
        if len(drawn) < len(token_ids):
            hidden = hidden[torch.tensor([last_rows[index] for index in drawn], device=device)]
        return self.decoder.logits(hidden)

    def _move_blocks(self, plan: Plan) -> None:
        # This order is the scheduler's promise: a block may be read by one of these and then be another's target.
        self.pool.swap_out(_pairs(plan.swaps_out))
        self.pool.copy_blocks(_pairs(plan.copies))
        self.pool.swap_in(_pairs(plan.swaps_in))
        self.pool.clear([block for chunk in plan.chunks for block in _entered(chunk, self.pool.block_size)])


def _pairs(copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.target) for copy in copies]


def _entered(chunk: Chunk, block_size: int) -> tuple[int, ...]:
    """The block that a chunk enters at its beginning and leaves partly unwritten."""
    index = len(chunk.block_table) - 1
    return chunk.block_table[index:] if index * block_size >= chunk.start and chunk.end % block_size else ()
