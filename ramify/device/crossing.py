"""CrossedLayers: a model on another device than the one that draws.

    tokens, positions, slots    go there      three numbers a row
    logits                      come back     once a step: (R, vocabulary) float32

Whoever holds them sees layers on the device that draws; hidden states stay where they were computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.device.layers import Batch, Layers, Pool
from ramify.device.reads import Reads, SharingRule


class CrossedLayers:
    """`device` is where draws are made, whatever the device of these layers is."""

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._layers = layers
        self.device = device
        self.vocab_size = layers.vocab_size
        self.sharing: SharingRule = layers.sharing
        self.num_crossings = 0  # of logits, so far

    @property
    def pool(self) -> Pool:
        return self._layers.pool

    def prepare(self, reads: Reads) -> None:
        self._layers.prepare(reads)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Returns hidden states there."""
        crossed = Batch(*(self._there(column) for column in batch))
        return self._layers.forward(crossed, None if rows is None else self._there(rows))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Of hidden states there, logits here."""
        logits = self._layers.logits(hidden)
        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=self.device)
        self.num_crossings += 1
        return out.copy_(logits)

    def _there(self, numbers: Tensor) -> Tensor:
        """A copy, also where both devices are one: nothing of here is read there."""
        return numbers.to(self._layers.device, copy=True)
