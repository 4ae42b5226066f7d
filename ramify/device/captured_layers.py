"""CapturedLayers: layers that capture their own graphs, for callers whose own graphs cannot hold them.

A graph belongs to one device and one process. Where a model is on another device than the one that draws, or is shared
by ranks, a step's pieces are not one graph: each device, and each rank, captures the model's piece by itself. All ranks
see the same calls in the same order, so that they capture, and replay, at the same moment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.device.graphs import Graphs, Shape
from ramify.device.guard import on
from ramify.device.layers import Batch, Layers, Pool
from ramify.device.reads import Reads, SharingRule
from ramify.engine.plan import Work

NUM_COLUMNS = len(Batch._fields)


class CapturedLayers:
    """Decodes, whose numbers of rows come again, are captured; pieces of prompts run as they are.

    What is returned is overwritten by the next call.
    """

    def __init__(self, layers: Layers, max_rows: int, *, use_graphs: bool = True) -> None:
        self._layers = layers
        self.device = layers.device
        self.vocab_size = layers.vocab_size
        self.sharing: SharingRule = layers.sharing
        self.pool = GuardedPool(layers.pool, layers.device)
        self.graphs = Graphs(layers.device, use_graphs=use_graphs)
        # What graphs read and write.
        self._numbers = torch.zeros(NUM_COLUMNS, max_rows, dtype=torch.int64, device=layers.device)
        self._hidden: Tensor | None = None  # (max_rows, hidden), once something was computed
        self._logits = torch.empty(max_rows, layers.vocab_size, dtype=torch.float32, device=layers.device)
        self._has_shared, self._has_prompts = False, False

    def prepare(self, reads: Reads) -> None:
        self._has_shared, self._has_prompts = bool(reads.shared), reads.num_singles < reads.size
        with on(self.device):
            self._layers.prepare(reads)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        size, most = len(batch.token_ids), self._numbers.shape[1]
        with on(self.device):
            if self._has_prompts or rows is not None or size > most:
                return self._layers.forward(batch, rows)
            for own, column in zip(self._numbers, batch, strict=True):
                own[:size] = column
            self.graphs.run(Shape("decodes", 0, size, self._has_shared), lambda: self._forward(size))
        assert self._hidden is not None, "computed just now"
        return self._hidden[:size]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        kept, size = self._hidden, len(hidden)
        with on(self.device):
            if kept is None or hidden.data_ptr() != kept.data_ptr() or size > len(kept):
                return self._layers.logits(hidden, out)
            told = self._logits[:size]
            self.graphs.run(Shape("logits", 0, size), lambda: self._layers.logits(kept[:size], told))
            return told if out is None else out.copy_(told)

    def _forward(self, size: int) -> None:
        hidden = self._layers.forward(Batch(*self._numbers[:, :size]))
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._numbers.shape[1], hidden.shape[1])
        self._hidden[:size] = hidden


class GuardedPool:
    """A cache whose blocks move on their own device."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.inner = pool
        self._device = device

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    def move(self, work: Work) -> None:
        with on(self._device):
            self.inner.move(work)
