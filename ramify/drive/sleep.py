"""Sleep: an engine that gives its memory to others for a while, a trainer's optimiser above all.

    level 1   weights wait in host memory (on a CPU they stay where they are), the cache is forgotten
    level 2   weights are forgotten too: `load_weights` brings others

Whoever wakes up may take the weights' memory first, load, and then the cache's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from ramify import validation as check
from ramify.device.memory_returned import PutAway
from ramify.device.pool import KVPool
from ramify.device.step import DeviceStep
from ramify.drive.chained_model import ChainedModel
from ramify.drive.draft_model import DraftModel
from ramify.engine.core import EngineCore
from ramify.errors import EngineAsleepError, InvalidInputError, UnsupportedError
from ramify.models.decoder import Decoder, linears, parameters

WakeTag = Literal["weights", "kv_cache"]
LEVELS = (1, 2)

_log = logging.getLogger(__name__)


class Sleeper:
    """The weights and the cache of one model: each is there, or put away."""

    def __init__(self, core: EngineCore, decoder: Decoder, *, is_shared: bool) -> None:
        self._core = core
        self._decoder = decoder
        self._is_shared = is_shared  # among ranks, of which this is the first
        self._weights: PutAway | None = None
        self._asleep: set[str] = set()

    def check_awake(self, *tags: WakeTag) -> None:
        """Raises EngineAsleepError unless these are there (default: all)."""
        if missing := self._asleep & set(tags or get_args(WakeTag)):
            raise EngineAsleepError(f"the engine sleeps ({', '.join(sorted(missing))}): call wake_up() first")

    def sleep(self, level: int) -> bool:
        """Returns whether weights were forgotten."""
        check.integer("level", level, LEVELS[0], LEVELS[-1])
        if self._is_shared:
            raise UnsupportedError("an engine with tensor_parallel_size above 1 cannot sleep: drop it and make another")
        speculation = self._core.scheduler.speculation
        if speculation is not None and isinstance(speculation.drafter, DraftModel | ChainedModel):
            raise UnsupportedError("an engine with a draft model (speculation) cannot sleep: drop it and make another")
        if level == 2 and (formats := self._decoder.quantised_formats):
            raise InvalidInputError(
                f"level must be 1 where weights are held quantised ({', '.join(formats)}): others cannot be loaded in "
                "their place. LLM(…, dequantize=True) holds them as float32"
            )
        if self._asleep:
            raise EngineAsleepError("the engine sleeps already: call wake_up() before it sleeps again")
        if self._core.has_unfinished():
            raise InvalidInputError("an engine sleeps between calls only: requests are running")
        step = self._step()
        self._core.reset_prefix_cache()
        self._core.release_all_kept()
        self._asleep = set(get_args(WakeTag))
        step.forget_addresses()
        for pool in _pools(step):
            pool.give_back()
        on_cpu = self._decoder.device.type == "cpu"
        if level == 2 or not on_cpu:
            tensors = [tensor for _, tensor in parameters(self._decoder) if tensor.device.type != "meta"]
            for linear in linears(self._decoder):
                if level == 2:
                    linear.drop()
                tensors += [tensor for part in linear.parts.values() for tensor in part.tensors]
            self._weights = PutAway(tensors, keep=level == 1)
        if not on_cpu:
            torch.cuda.empty_cache()
        _log.info("asleep (level %d)", level)
        return level == 2

    def wake_up(self, tags: Sequence[WakeTag] | None) -> None:
        wanted = get_args(WakeTag) if tags is None else tuple(tags)
        for tag in wanted:
            check.choice("tags", tag, get_args(WakeTag))
        if "weights" in wanted and self._weights is not None:
            self._weights.bring_back()
            self._weights = None
        if "kv_cache" in wanted and "kv_cache" in self._asleep:
            for pool in _pools(self._step()):
                pool.take_again()
        self._asleep -= set(wanted)

    def _step(self) -> DeviceStep:
        assert isinstance(self._core.device, DeviceStep), "LLM has a real device"
        return self._core.device


def _pools(step: DeviceStep) -> list[KVPool]:
    return [lane.layers.pool for lane in step.lanes if isinstance(lane.layers.pool, KVPool)]
