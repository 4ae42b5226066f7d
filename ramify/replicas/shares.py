"""Shares: what each of several engines gets of a machine: a GPU, or some cores of its CPU."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import torch

from ramify.config import ModelConfig
from ramify.cpu.cores import usable_cores
from ramify.errors import InvalidInputError
from ramify.models.loader import resolve_device
from ramify.remote.engine_process import CoreShare


@dataclass(frozen=True, slots=True)
class Share:
    """The device of one engine, and on a CPU what it may use of it."""

    device: str
    of_cpu: CoreShare | None = None


def shares_of(config: ModelConfig) -> list[Share]:
    """One for each replica; what the machine has not got is refused with the numbers."""
    count, device = config.data_parallel_size, resolve_device(config.device)
    if device.type == "cpu":
        return [Share("cpu", share) for share in core_shares(count, usable_cores(), _allowed())]
    if ":" in config.device:
        raise InvalidInputError(
            f"device must be 'auto', 'cuda' or 'cpu' with data_parallel_size {count}, got {config.device!r}: replicas "
            "take the GPUs from the first on (CUDA_VISIBLE_DEVICES chooses which there are)"
        )
    there, ranks = torch.cuda.device_count(), config.num_ranks
    if count * ranks > there:
        own = "its own" if ranks == 1 else f"{ranks} of its own (tensor_parallel_size)"
        raise InvalidInputError(
            f"data_parallel_size must be at most the number of GPUs ({there}), got {count}: each replica has {own}"
        )
    return [
        Share(",".join(f"cuda:{index}" for index in range(first, first + ranks)))
        for first in range(0, count * ranks, ranks)
    ]


def core_shares(count: int, threads: int, allowed: Collection[int]) -> list[CoreShare]:
    """Neighbouring cores for each, so that a replica's threads share caches and memory; more replicas than cores have
    one thread each, on any of them."""
    each = max(1, threads // count)
    cores = sorted(allowed)
    if count > len(cores):
        return [CoreShare(each) for _ in range(count)]
    bounds = [index * len(cores) // count for index in range(count + 1)]
    return [CoreShare(each, frozenset(cores[start:end])) for start, end in pairwise(bounds)]


def _allowed() -> Collection[int]:
    """The cores that this process may run on; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
