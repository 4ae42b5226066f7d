"""The ways to attend to shared prefixes: which kernel walks them, and when rows' own parts are read.

after     prefix ======= own parts, merged with what the prefix gave ===
beside    prefix =======                                                     both kernels on every processor at once
          own parts ====== merge ==
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ramify.gpu.kernels import divided_prefix, hopper_prefix, prefix_attention


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
    own_options: Mapping[str, Any] | None = None  # of own_parts, where own parts are read beside


SCHEDULED = PrefixWay(
    hopper_prefix.scheduled,
    hopper_prefix.BLOCK_M,
    hopper_prefix.BLOCK_N,
    hopper_prefix.PROGRAMS_PER_PROCESSOR,
)
# Two programs of 192 registers a thread leave room for one of own_parts, and so does one of three roles with 136.
SCHEDULED_BESIDE = replace(SCHEDULED, options={"max_registers": hopper_prefix.REGISTERS_BESIDE_OTHERS}, own_options={})
DIVIDED = PrefixWay(divided_prefix.divided, divided_prefix.BLOCK_M, divided_prefix.ALONE.positions, 1)
DIVIDED_BESIDE = replace(DIVIDED, options={"roles": divided_prefix.BESIDE_OTHERS}, own_options={})


def way_for(device: torch.device, dtype: torch.dtype, head_dim: int, *, exact: bool) -> PrefixWay:
    if not exact and hopper_prefix.can_schedule(device, dtype, head_dim):
        return SCHEDULED
    return PrefixWay(
        prefix_attention.prefix_attention,
        *prefix_attention.tile_of(dtype.itemsize, exact=exact),
        prefix_attention.PROGRAMS_PER_PROCESSOR,
        overlaps=False,
        options={"exact": exact},
    )
