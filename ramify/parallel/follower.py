"""A rank that follows: it holds its part of every model and does what it is told, in the order of telling."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.config import EngineConfig
from ramify.cpu.cpu_layers import cpu_layers
from ramify.cpu.library import load
from ramify.cpu.panels import PanelPacking
from ramify.device.captured_layers import CapturedLayers
from ramify.device.guard import on
from ramify.device.layers import Batch, Layers
from ramify.device.pool import KVPool
from ramify.device.rehearsal import forget_peak, memory_of
from ramify.engine.sharing import Table
from ramify.errors import ProtocolError
from ramify.models.loader import ModelLoader, resolve_device
from ramify.models.weights import FLOATS, replace_one
from ramify.parallel.group import ranks_on
from ramify.parallel.orders import Forward, Load, Logits, Measure, Move, Order, Prepare, Replace, Serve, order_of

FLOATS_BY_NAME = {str(dtype): dtype for dtype in FLOATS}
READY = b'{"ready": true}\n'


def follow(next_line: Callable[[], bytes], answer: Callable[[bytes], None]) -> None:
    """Until an order fails. What has gone wrong is told and not tried again: ranks that are out of step are lost."""
    try:
        loading = order_of(next_line())
        if not isinstance(loading, Load):
            raise ProtocolError("a rank must be told first what to load")
        answer(READY)  # to meet the others, who would wait for one that never comes
        follower = Follower(loading)
        answer(READY)
        with torch.inference_mode(), on(follower.device):
            while True:
                told = follower.do(order_of(next_line()))
                if told is not None:
                    answer(json.dumps(told).encode() + b"\n")
    except Exception as error:
        answer(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        raise


class Follower:
    def __init__(self, loading: Load) -> None:
        self._configs = [EngineConfig.from_options(**options) for options in loading.models]
        self.device = resolve_device(self._configs[0].model_config.device)
        self._backend = loading.backend
        self._ranks = ranks_on(loading.backend, Path(loading.meeting_point), loading.rank, loading.size)
        with on(self.device):
            self._decoders = [
                ModelLoader(config).load_model(
                    packing=_packing(config) if loading.uses_panels else None, ranks=self._ranks
                )
                for config in self._configs
            ]
        self._weights = 0  # bytes on a GPU
        self._pools: Sequence[KVPool] = []
        self._layers: Sequence[Layers] = []
        # Of each model, what was computed last, and the block tables of its last step.
        self._last: list[Tensor | None] = []
        self._tables: list[Sequence[Table]] = []

    def do(self, order: Order) -> dict[str, Any] | None:
        """Returns what the leading rank waits for, if it does."""
        if isinstance(order, Serve):
            self._serve(order)
            return {"ready": True}
        if isinstance(order, Measure):
            cache = sum(pool.kv.nbytes for pool in self._pools)
            return {"ready": True, "memory": list(astuple(memory_of(self.device, cache, self._weights)))}
        if isinstance(order, Load):
            raise ProtocolError("a rank loads once")
        if isinstance(order, Move):
            self._pools[order.model].move(order.work())
        elif isinstance(order, Prepare):
            reads = order.reads(self._tables[order.model])
            self._tables[order.model] = reads.tables
            self._layers[order.model].prepare(reads)
        elif isinstance(order, Forward):
            batch = Batch(*self._received(len(Batch._fields), order.num_rows))
            rows = None if order.num_wanted is None else self._received(order.num_wanted)
            self._last[order.model] = self._layers[order.model].forward(batch, rows)
        elif isinstance(order, Logits):
            self._logits(order)
        elif isinstance(order, Replace):
            decoder = self._decoders[order.model]
            whole = self._ranks.share(torch.empty(order.shape, dtype=FLOATS_BY_NAME[order.dtype]))
            replace_one(decoder, order.name, decoder.shard.cut(order.name, whole))
        return None

    def _received(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """What the leading rank sends now."""
        return self._ranks.share(torch.empty(shape, dtype=dtype, device=self.device))

    def _logits(self, order: Logits) -> None:
        decoder, last = self._decoders[order.model], self._last[order.model]
        if not order.are_last:
            hidden = self._received(order.num_rows, decoder.arch.hidden_size, dtype=decoder.dtype)
        elif last is None:
            raise ProtocolError("logits of nothing")
        else:
            hidden = last[: order.num_rows]
        self._layers[order.model].logits(hidden)

    def _serve(self, order: Serve) -> None:
        if self.device.type == "cuda":
            self._pools, self._layers, self._last = [], [], []
            self._weights = forget_peak(self.device)
        size = self._configs[0].cache_config.block_size
        self._pools = [
            KVPool(each.arch, order.num_blocks, size, each.dtype, each.device, num_host_blocks=order.num_host_blocks)
            for each in self._decoders
        ]
        pairs = zip(self._decoders, self._pools, strict=True)
        self._last, self._tables = [None] * len(self._decoders), [()] * len(self._decoders)
        if self.device.type == "cpu":
            self._layers = [cpu_layers(*pair) for pair in pairs]
            return
        from ramify.gpu.gpu_step import gpu_layers  # needs Triton, which only a GPU needs

        use_graphs = self._backend == "nccl" and not self._configs[0].model_config.enforce_eager
        self._layers = [
            CapturedLayers(
                gpu_layers(*pair, max_rows=order.max_rows, max_model_len=order.max_model_len),
                order.max_rows,
                use_graphs=use_graphs,
            )
            for pair in pairs
        ]


def _packing(config: EngineConfig) -> PanelPacking:
    return PanelPacking(load(lambda _: None), dequantize=config.model_config.dequantize)
