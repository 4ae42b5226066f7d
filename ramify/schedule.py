"""What one step computes and moves, as the scheduler decides it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ramify.plan import BlockCopy, Chunk, SharedPrefix
from ramify.sequence import Sequence, Track


class ScheduledSequence(NamedTuple):
    """A sequence, the index of its first chunk in this step, and whether its whole gang has caught up after it."""

    sequence: Sequence
    first_chunk: int
    caught_up: bool


@dataclass(slots=True)
class Schedule:
    """What one step computes and moves; filled while it is made, read-only afterwards."""

    budget: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)  # whose chunk each is
    copies: list[BlockCopy] = field(default_factory=list)
    late_copies: list[BlockCopy] = field(default_factory=list)  # of what came back in this step
    swaps_out: list[BlockCopy] = field(default_factory=list)
    swaps_in: list[BlockCopy] = field(default_factory=list)
    shared: list[SharedPrefix] = field(default_factory=list)
    num_preempted: int = 0
    is_short: bool = False  # some found no room, and nobody could be made to give way
    # By request, one number per track, for prompts that found a prefix.
    num_cached_tokens: dict[str, list[int]] = field(default_factory=dict)
