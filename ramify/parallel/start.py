"""From a configuration to the ranks that share its models, or to none; what cannot be shared is refused first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ramify.config import EngineConfig
from ramify.errors import UnsupportedError
from ramify.models.loader import ModelLoader, rank_devices
from ramify.models.shards import Shard
from ramify.parallel.group import Backend
from ramify.parallel.team import Team


def start_team(loaders: Sequence[ModelLoader], config: EngineConfig, *, uses_panels: bool) -> Team | None:
    """The other ranks, loading already; None where there is one rank.

    Who computes must be the same on all of them: the CPU's kernels, with weights in panels, or torch's operators.
    """
    size = config.model_config.num_ranks
    if size == 1:
        return None
    if config.model_config.batch_invariant:
        raise UnsupportedError(
            f"tensor_parallel_size must be 1 with batch_invariant, got {size}: ranks add up their parts in an order "
            "that is not promised"
        )
    if config.model_config.int8_activations:
        raise UnsupportedError(f"tensor_parallel_size must be 1 with int8_activations, got {size}")
    for loader in loaders:
        Shard(loader.architecture, 0, size)
    devices = rank_devices(config.model_config)
    return Team([_options(loader, config) for loader in loaders], devices, _backend(devices), uses_panels=uses_panels)


def _backend(devices: Sequence[torch.device]) -> Backend:
    """NCCL between GPUs, of which it wants a different one for each rank."""
    known, size = torch.distributed.is_available(), len(devices)
    if not (known and torch.distributed.is_gloo_available()):
        raise UnsupportedError(f"tensor_parallel_size {size} needs a torch with gloo, and this one was built without")
    if devices[0].type == "cpu" or len(set(devices)) < size:
        return "gloo"
    if not torch.distributed.is_nccl_available():
        raise UnsupportedError(
            f"tensor_parallel_size {size} on GPUs needs a torch with NCCL, and this one was built without"
        )
    return "nccl"


def _options(loader: ModelLoader, config: EngineConfig) -> dict[str, Any]:
    """Of the engine, flat; the files as this process found them. Each rank is told its own device."""
    options = {**asdict(config.model_config), **asdict(config.cache_config), **asdict(config.scheduler_config)}
    return {**options, "model": str(loader.path.absolute()), "tokenizer": None}
