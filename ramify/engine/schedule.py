"""What one step computes and moves, as the scheduler decides it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from ramify.engine.metrics import TrackCounts
from ramify.engine.plan import Row, Work
from ramify.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence, the last row of each of its chunks, and whether its whole gang has caught up after this step."""

    sequence: Sequence
    rows: tuple[Row, ...]
    caught_up: bool


@dataclass(slots=True)
class Schedule:
    """Filled while it is made, read-only afterwards."""

    budget: int
    works: list[Work]  # of each model
    sequences: list[ScheduledSequence] = field(default_factory=list)
    num_preempted: int = 0
    is_short: bool = False  # some found no room, and nobody could be preempted
    tracks: defaultdict[int, TrackCounts] = field(default_factory=lambda: defaultdict(TrackCounts))  # by role
    num_cached_tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by request
