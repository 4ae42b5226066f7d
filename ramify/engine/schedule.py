"""What one step computes and moves, as the scheduler decides it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from ramify.engine.metrics import TrackCounts
from ramify.engine.plan import Onward, Row, Work
from ramify.engine.search.child import Child
from ramify.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence, the last row of each of its chunks, and whether its whole gang has caught up after this step."""

    sequence: Sequence
    rows: tuple[Row, ...]
    caught_up: bool


@dataclass(frozen=True, slots=True)
class GoingOn:
    """Those who just go on: what the device is told of them, and what recording their tokens takes."""

    onward: Onward
    children: list[Child]  # of each member; not changed any more
    ending: list[int]  # members whose next token is their last
    end_token_ids: frozenset[int]  # tokens at which some member ends; others may take them for content
    apart: frozenset[int]  # members whose tokens are looked at one by one: streamed, or with stop strings

    def quiet(self) -> Iterable[tuple[int, Child]]:
        """The other members, by their places."""
        if not self.apart:
            return enumerate(self.children)
        return [(index, child) for index, child in enumerate(self.children) if index not in self.apart]

    def may_end(self, token_ids: Items[int]) -> list[int]:
        """Those of them that may have ended with these tokens, one for each member."""
        at = set(self.ending)
        if not self.end_token_ids.isdisjoint(token_ids):
            at.update(index for index, _ in enumerate(self.children) if token_ids[index] in self.end_token_ids)
        return sorted(at - self.apart)


@dataclass(slots=True)
class Schedule:
    """Filled while it is made, read-only afterwards."""

    budget: int
    works: list[Work]  # of each model
    sequences: list[ScheduledSequence] = field(default_factory=list)  # but for those who just go on
    going_on: GoingOn | None = None
    moving: list[range] = field(default_factory=list)  # chunks of searches that go on before their choice is known
    num_preempted: int = 0
    num_drafted: int = 0  # tokens, of all sequences
    is_short: bool = False  # some found no room, and nobody could be preempted
    tracks: defaultdict[int, TrackCounts] = field(default_factory=lambda: defaultdict(TrackCounts))  # by role
    num_cached_tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by request

    @property
    def is_empty(self) -> bool:
        return not self.sequences and self.going_on is None
