"""A step under way, between the decision and the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ramify.engine.plan import Draw, Plan, StepResult, Ticket
from ramify.engine.schedule import Schedule
from ramify.engine.sequence import Sequence
from ramify.structured.matcher import Matcher, ask_early


@dataclass(slots=True)
class Launched:
    """A step under way: what it was scheduled for, what was asked of the device, and where its result will be.

    Where draws follow grammars and the tokens before them are not known yet, the device computes what they are drawn
    from, and they are drawn once these tokens are told.
    """

    schedule: Schedule
    plan: Plan
    drawing: list[Sequence]  # of each of the plan's own draws, the sequence that it continues
    ticket: Ticket | None = None
    draw: Callable[[], Ticket] | None = None  # what is left to do until there is a ticket

    @property
    def awaits_tokens(self) -> bool:
        """Whether some grammar must know a token of the step before."""
        onward = self.plan.onward
        return bool(onward is not None and onward.following) or any(
            draw.matcher is not None and sequence.num_pending
            for draw, sequence in zip(self.plan.draws, self.drawing, strict=True)
        )

    def result(self) -> StepResult:
        """Waits for it."""
        assert self.ticket is not None, "its draws wait for the step before"
        return self.ticket()

    def tell(self, before: Launched, result: StepResult) -> None:
        """Grammars take the tokens of the step before, and the draws are made: later, if others find the masks, so that
        the host goes on meanwhile."""
        if self.draw is None:
            return
        told: Items[Matcher] = ()
        token_ids, faults, onward = result.token_ids, result.faults, self.plan.onward
        if onward is not None:
            told, sources = onward.matchers, onward.sources[onward.following].tolist()
            for matcher, source in zip(told, sources, strict=True):
                if source not in faults:
                    matcher.take(token_ids[source])
        pending = [
            (draw.matcher, sequence)
            for draw, sequence in zip(self.plan.draws, self.drawing, strict=True)
            if draw.matcher is not None and sequence.num_pending
        ]
        if pending:
            places = before.places()
            for matcher, sequence in pending:
                source = places[sequence.seq_id]
                if source not in faults:
                    matcher.take(token_ids[source])
        if not ask_early(told):
            self.make_draws()

    def make_draws(self) -> None:
        """If they are not made yet."""
        if self.draw is not None:
            self.ticket, self.draw = self.draw(), None

    def places(self) -> dict[str, int]:
        """By sequence, where the result has its token."""
        going_on = self.schedule.going_on
        members = [] if going_on is None else [child.sequence for child in going_on.children]
        return {sequence.seq_id: place for place, sequence in enumerate([*members, *self.drawing])}

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
