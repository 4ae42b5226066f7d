"""One model's part of a step: chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.attention.base import Attention
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import BlockCopy, Chunk


class Runner:
    def __init__(self, decoder: Decoder, pool: KVPool, attention: Attention) -> None:
        self.decoder = decoder
        self.pool = pool
        self.attention = attention

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], copies: Sequence[BlockCopy], drawn: Sequence[int]) -> Tensor:
        """Computes all chunks; returns float32 logits (len(drawn), vocabulary) after the last tokens of those drawn."""
        self.pool.copy_blocks((copy.source, copy.target) for copy in copies)
        token_ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for chunk in chunks:
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            last_rows.append(len(token_ids) - 1)
        device = self.decoder.device
        self.attention.prepare(chunks, self.pool)
        hidden = self.decoder.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            self.attention.forward,
        )
        if not drawn:
            return torch.empty(0, self.decoder.arch.vocab_size, device=device)
        rows = torch.tensor([last_rows[index] for index in drawn], device=device)
        return self.decoder.logits(hidden[rows])
