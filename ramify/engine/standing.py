"""Standing: which gangs run and which wait, and the order among them.

Gangs have an order (priority, arrival, child): the first in it is served first, the last gives up its blocks when
others lack some, so the first always gets on and nobody waits for ever. Of those that run, the ones that just go on
are kept together in a cohort (`engine/cohort.py`); the others are looked at one by one.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ramify.engine.blocks import BlockManager
from ramify.engine.cohort import Cohort
from ramify.engine.demands import Demands
from ramify.engine.gang import Gang
from ramify.engine.search.child import Child
from ramify.engine.sequence import Order, Sequence, SequenceStatus


class Standing:
    """The lists stand in order. Every running gang is either loose or in the cohort."""

    def __init__(self, manager: BlockManager) -> None:
        """The manager is the first model's: a cohort has one."""
        self.running: list[Gang] = []
        self.waiting: list[Gang] = []
        self.loose: list[Gang] = []
        self.cohort = Cohort(manager)
        self.gang_of: dict[str, Gang] = {}  # by the name of each sequence

    @property
    def num_running(self) -> int:
        """Sequences, with the places that gangs keep for forks to come."""
        return len(self.cohort) + sum(gang.size for gang in self.loose)

    @property
    def num_waiting(self) -> int:
        return sum(len(gang.sequences) for gang in self.waiting)

    # -- gangs come and go ---------------------------------------------------------------------------------------------

    def run(self, gang: Gang) -> None:
        insort(self.running, gang, key=_order)
        insort(self.loose, gang, key=_order)

    def wait(self, gang: Gang, status: SequenceStatus = SequenceStatus.WAITING) -> None:
        gang.move(status)
        insort(self.waiting, gang, key=_order)

    def arrive(self, gang: Gang) -> None:
        """As `wait`, for one whose sequences have never run."""
        insort(self.waiting, gang, key=_order)

    def stop_running(self, gang: Gang) -> bool:
        """Returns whether it ran."""
        if not _take_out(self.loose, gang):
            self.cohort.leave(gang.sequences[0])
        return _take_out(self.running, gang)

    def leave(self, sequence: Sequence) -> None:
        """It has ended; a gang with nobody in it is nowhere any more."""
        gang = self.gang_of.pop(sequence.seq_id, None)
        if gang is None:
            return
        if gang.restart and sequence is gang.sequences[0]:
            gang.restart = []  # nobody to fork from any more: the others start by themselves
        if len(gang.sequences) == 1 and not self.stop_running(gang):
            _take_out(self.waiting, gang)
        gang.sequences.remove(sequence)

    # -- the cohort ----------------------------------------------------------------------------------------------------

    def join_cohort(self, sequence: Sequence, child: Child, demands: Demands, source: int, *, is_quiet: bool) -> None:
        _take_out(self.loose, self.gang_of[sequence.seq_id])
        self.cohort.join(sequence, child, demands, source, is_quiet=is_quiet)

    def stop_those_at_their_end(self) -> None:
        """Whose token under way is the last one waits for that to be known."""
        for sequence in self.cohort.those_at_their_end():
            sequence.is_blocked = True
            self.cohort.leave(sequence)
            insort(self.loose, self.gang_of[sequence.seq_id], key=_order)

    def dissolve_cohort(self, *, num_pending: int) -> None:
        """Everyone is looked at alone."""
        if len(self.cohort):
            for sequence in self.cohort.dissolve():
                sequence.num_pending = num_pending
            self.loose = list(self.running)

    # -- who gives way -------------------------------------------------------------------------------------------------

    def victim(self, gang: Gang) -> Gang:
        """Who gives up blocks so that `gang` can grow: the last to run, else a later one that waits with some."""
        last = self.running[-1]
        if last is not gang:
            return last
        holder = self.last_holder()
        return holder if holder is not None and holder.order > gang.order else gang

    def last_holder(self, but: Gang | None = None) -> Gang | None:
        """The last that waits and holds blocks all the same."""
        for gang in reversed(self.waiting):
            if gang is not but and any(track.num_computed for _, track in gang.tracks()):
                return gang
        return None


def _order(gang: Gang) -> Order:
    return gang.order


def _take_out(ordered: list[Gang], gang: Gang) -> bool:
    """Removes a gang from a list that stands in order; returns whether it was there."""
    index = bisect_left(ordered, gang.order, key=_order)
    if index < len(ordered) and ordered[index] is gang:
        del ordered[index]
        return True
    return False
