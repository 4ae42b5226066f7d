"""A rank that follows: it holds its part of every model and does what it is told, in the order of telling."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ramify.config import EngineConfig
from ramify.cpu.cpu_layers import cpu_layers
from ramify.cpu.library import load
from ramify.cpu.panels import PanelPacking
from ramify.device.layers import Batch, Layers
from ramify.device.pool import KVPool
from ramify.errors import ProtocolError
from ramify.models.loader import ModelLoader
from ramify.models.weights import FLOATS, replace_one
from ramify.parallel.group import RankGroup
from ramify.parallel.orders import Forward, Load, Logits, Move, Order, Prepare, Replace, Serve, order_of

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
        with torch.inference_mode():
            while True:
                if follower.do(order_of(next_line())):
                    answer(READY)
    except Exception as error:
        answer(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        raise


class Follower:
    def __init__(self, loading: Load) -> None:
        self._ranks = RankGroup(Path(loading.meeting_point), loading.rank, loading.size)
        self._configs = [EngineConfig.from_options(**options) for options in loading.models]
        self._decoders = [
            ModelLoader(config).load_model(packing=_packing(config) if loading.uses_panels else None, ranks=self._ranks)
            for config in self._configs
        ]
        self._pools: Sequence[KVPool] = []
        self._layers: Sequence[Layers] = []

    def do(self, order: Order) -> bool:
        """Returns whether the leading rank waits for an answer."""
        if isinstance(order, Serve):
            self._serve(order)
            return True
        if isinstance(order, Load):
            raise ProtocolError("a rank loads once")
        if isinstance(order, Move):
            self._pools[order.model].move(order.work())
        elif isinstance(order, Prepare):
            self._layers[order.model].prepare(order.reads())
        elif isinstance(order, Forward):
            batch = Batch(*(torch.tensor(column, dtype=torch.int64) for column in order.numbers))
            rows = None if order.rows is None else torch.tensor(order.rows, dtype=torch.int64)
            self._layers[order.model].forward(batch, rows)
        elif isinstance(order, Logits):
            decoder = self._decoders[order.model]
            hidden = torch.empty(order.num_rows, decoder.arch.hidden_size, dtype=decoder.dtype)
            self._layers[order.model].logits(self._ranks.share(hidden))
        elif isinstance(order, Replace):
            decoder = self._decoders[order.model]
            whole = self._ranks.share(torch.empty(order.shape, dtype=FLOATS_BY_NAME[order.dtype]))
            replace_one(decoder, order.name, decoder.shard.cut(order.name, whole))
        return False

    def _serve(self, order: Serve) -> None:
        size = self._configs[0].cache_config.block_size
        self._pools = [
            KVPool(each.arch, order.num_blocks, size, each.dtype, each.device, num_host_blocks=order.num_host_blocks)
            for each in self._decoders
        ]
        self._layers = [cpu_layers(*pair) for pair in zip(self._decoders, self._pools, strict=True)]


def _packing(config: EngineConfig) -> PanelPacking:
    return PanelPacking(load(lambda _: None), dequantize=config.model_config.dequantize)
