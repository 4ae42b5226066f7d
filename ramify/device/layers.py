"""What computes a model over its cache: torch's operators (the truth), the CPU's kernels, or the GPU's."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ramify.device.pool import KVPool
from ramify.device.reads import Reads, SharingRule
from ramify.device.torch_attention import SHARING, TorchAttention
from ramify.engine.plan import Work
from ramify.models.decoder import Decoder


class Batch(NamedTuple):
    """One model's rows of a step, as tensors (T,) on its device."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor  # where each row's keys and values go; negative: nowhere, the row is padding


class Pool(Protocol):
    """A model's cache, as a step sees it."""

    @property
    def block_size(self) -> int: ...

    def move(self, work: Work) -> None:
        """Copies and swaps of a step, before anything of it is computed."""


class Layers(Protocol):
    """Tokens in, hidden rows out."""

    @property
    def pool(self) -> Pool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def sharing(self) -> SharingRule: ...

    def prepare(self, reads: Reads) -> None:
        """Once a step, before `forward`: who reads what."""

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Keeps the keys and values of all rows; returns hidden states (R, hidden) after these rows, or after all.

        rows (R,) int64 ascend, padding at their end left aside. What is returned may be overwritten by the next call.
        """

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """(R, hidden) -> (R, vocabulary) float32, in `out` where it is given."""


class TorchLayers:
    def __init__(self, decoder: Decoder, pool: KVPool, sharing: SharingRule = SHARING) -> None:
        self.decoder = decoder
        self.pool = pool
        self.device = decoder.device
        self.vocab_size = decoder.arch.vocab_size
        self.sharing = sharing
        self._attention = TorchAttention()

    def prepare(self, reads: Reads) -> None:
        self.pool.clear(_entered(reads))
        self._attention.prepare(reads, self.pool)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.pool.write(layer, batch.slots, keys, values)
            return self._attention.forward(layer, queries, keys, values)

        hidden = self.decoder.forward(batch.token_ids, batch.positions, attend)
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self.decoder.logits(hidden)
        return logits if out is None else out.copy_(logits)


def _entered(reads: Reads) -> list[int]:
    """The blocks that chunks enter at their beginning and leave partly unwritten."""
    starts, ends = reads.ends - 1, reads.ends - 1 + reads.num_rows
    last = (ends - 1) // reads.block_size
    partly = (last * reads.block_size >= starts) & (ends % reads.block_size > 0)
    return [reads.tables[chunk][last[chunk]] for chunk in partly.nonzero()[0].tolist()]
