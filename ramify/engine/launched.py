"""A step under way, between the decision and the record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ramify.engine.plan import Draw, Plan, StepResult, Ticket
from ramify.engine.schedule import Schedule
from ramify.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: what it was scheduled for, what was asked of the device, and where its result will be."""

    schedule: Schedule
    plan: Plan
    drawing: list[Sequence]  # of each of the plan's own draws, the sequence that it continues
    ticket: Ticket

    @property
    def num_going_on(self) -> int:
        """Whose draws come before the plan's own in the result."""
        return 0 if self.plan.onward is None else len(self.plan.onward.members)

    def draws_one_by_one(self, result: StepResult) -> Iterator[tuple[int, Draw]]:
        """Draws that are recorded by themselves, with their places in the result: all of them if some failed."""
        going_on = self.schedule.going_on
        if going_on is not None:
            onward = going_on.onward
            for index in range(len(onward.members)) if result.faults else sorted(going_on.apart):
                yield index, onward.draw(index)
        drawn = zip(self.plan.draws, self.drawing, strict=True)
        for index, (draw, sequence) in enumerate(drawn, start=self.num_going_on):
            if draw.demands.is_search and sequence.is_finished():
                continue
            if draw.parent != sequence.child:
                # A beam has taken this place since the step was launched: it goes on from what was computed there.
                yield index, draw._replace(parent=sequence.child, child=sequence.child)
            else:
                yield index, draw
