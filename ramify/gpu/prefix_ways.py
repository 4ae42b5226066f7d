"""The kernels that walk shared prefixes, and what is to be known of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ramify.gpu.kernels import hopper_prefix, prefix_attention
from ramify.gpu.kernels.walk import EXACT_BLOCK_M, EXACT_BLOCK_N


@dataclass(frozen=True)
class PrefixWay:
    """`launch` takes an AttentionTask, a Sharing, `num_programs`, `options` and, where it `overlaps`, that too. It cuts
    shared parts into tiles of so many queries and positions, with so many programs of a processor at a time."""

    launch: Callable[..., None]
    queries: int
    positions: int
    programs: int
    overlaps: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


SCHEDULED = PrefixWay(
    hopper_prefix.scheduled,
    hopper_prefix.BLOCK_M,
    hopper_prefix.BLOCK_N,
    hopper_prefix.PROGRAMS_PER_PROCESSOR,
)


def way_for(device: torch.device, dtype: torch.dtype, head_dim: int, *, exact: bool) -> PrefixWay:
    if not exact and hopper_prefix.can_schedule(device, dtype, head_dim):
        return SCHEDULED
    size = dtype.itemsize
    queries, positions = (
        (EXACT_BLOCK_M, EXACT_BLOCK_N) if exact else (prefix_attention.BLOCK_M, prefix_attention.BLOCK_N)
    )
    return PrefixWay(
        prefix_attention.prefix_attention,
        queries[size],
        positions[size],
        prefix_attention.PROGRAMS_PER_PROCESSOR,
        overlaps=False,
        options={"exact": exact},
    )
