"""Speculation: for whom tokens are drafted in a step, how many, and what became of them.

A sequence whose next tokens are drafted computes them all in one step behind its last one, and draws after each. Every
draw has the noise of its own position, so it gives what it would have given later; the first that differs from the
draft ends the run, and what was computed behind it is overwritten. Tokens are those of a step for each.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from ramify.engine.demands import Demands
from ramify.engine.drafting.drafter import Drafter, Wanted
from ramify.engine.drafting.pace import FIRST_RATE, Pace, Prices
from ramify.engine.plan import Draw, StepResult
from ramify.engine.schedule import Schedule
from ramify.engine.sequence import Sequence

MOST_DOUBLINGS = 5  # of the steps between two looks, where looking in vain keeps a device from running ahead
SHARE_OF_ALL = 0.1  # of what one draft says about all


@dataclass(slots=True)
class _Open:
    """A request that may be drafted for."""

    demands: Demands
    paces: dict[int, Pace] = field(default_factory=dict)  # by child


class Speculation:
    most_draws = 0  # that the device has room for in a step, if it says so

    def __init__(self, drafter: Drafter, *, row_cost: float, most_rows: int | None = None, stall: float = 0.0) -> None:
        """row_cost: what a row adds to a step, of what a step takes without any. most_rows: with more of them in a step
        drafts never pay. stall: what a step takes longer, of itself, where the one after it cannot be launched before
        it is known."""
        self.drafter = drafter
        self.most_rows = most_rows
        self._row_cost = row_cost
        self._stall = stall
        self.reset()

    def reset(self) -> None:
        self._open: dict[str, _Open] = {}
        self._prices = Prices(0.0)  # of the last step
        self._company = 1.0  # of the rows beside one that is drafted for, how many are too
        self._num_rests = 0  # steps until the next look
        self._rate = FIRST_RATE  # of drafted tokens that were drawn lately, for who comes next
        self._num_vain = 0  # looks that found nothing, one after the other
        self.drafter.reset()

    # -- requests and sequences ------------------------------------------------------------------------------

    def begin(self, request_id: str, demands: Demands) -> None:
        if demands.may_speculate and self.drafter.serves(demands):
            self._open[request_id] = _Open(demands)
            self._num_vain = self._num_rests = 0

    def forget(self, sequence: Sequence) -> None:
        """It computes nothing more."""
        known = self._open.get(sequence.request_id)
        if known is not None:
            known.paces.pop(sequence.child, None)
            self.drafter.forget(sequence)

    def end(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            self.drafter.end(request_id)

    # -- steps -----------------------------------------------------------------------------------------------

    def rests(self) -> bool:
        """Whether a step may be decided before the one under way is known, and so without drafts; counts it."""
        if not self._open:
            return True
        self._num_rests -= 1
        return self._num_rests >= 0

    def draft(self, able: Items[Sequence], *, num_rows: int, budget: int) -> None:
        """Tokens for those of these sequences, a step of so many rows, whose pace is to have some."""
        if self.most_rows is not None and num_rows > self.most_rows:
            budget = 0
        filled = self._row_cost * num_rows
        of_rows = filled / (1 + filled)  # of a step's time
        self._prices = Prices(of_rows + self.drafter.cost, self._stall, _saved(of_rows, self._company, num_rows))
        wanted: list[Wanted] = []
        for sequence in able:
            known = self._open.get(sequence.request_id)
            if known is None or budget <= 0:
                continue
            pace = known.paces.get(sequence.child) or known.paces.setdefault(sequence.child, Pace(self._rate))
            most = min(pace.length(self._prices), budget, _room(sequence, known.demands))
            if most > 0:
                wanted.append(Wanted(sequence, known.demands, most))
                budget -= most
        drafts = self.drafter.draft(wanted) if wanted else []
        for (sequence, _, most), drafted in zip(wanted, drafts, strict=True):
            sequence.drafted = drafted[:most]
        num_drafting = sum(map(bool, drafts))
        self._note_look(num_drafting > 0)
        if num_drafting and num_rows > 1:
            self._company += SHARE_OF_ALL * (num_drafting / num_rows - self._company)
        self._prices = self._prices._replace(drawn=_saved(of_rows, num_drafting / max(1, num_rows), num_rows))

    def _note_look(self, has_found: bool) -> None:
        self._num_vain = 0 if has_found else min(self._num_vain + 1, MOST_DOUBLINGS)
        self._num_rests = 0 if has_found else 2**self._num_vain

    def note_launched(self, schedule: Schedule, draws: Items[Draw], drawing: Items[Sequence]) -> None:
        """A step is under way, and these sequences draw in it."""

    def note_step(
        self, schedule: Schedule, draws: Items[Draw], drawing: Items[Sequence], result: StepResult, now: float
    ) -> None:
        """A step is known, and not yet recorded: what was drawn for these sequences."""

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What a step gave a sequence: a token, and before it those that were drafted and drawn."""
        known = self._open.get(sequence.request_id)
        pace = None if known is None else known.paces.get(sequence.child)
        if pace is None:
            return
        if num_drafted:
            pace.note(num_drafted, num_accepted, self._prices)
            self._rate += SHARE_OF_ALL * (pace.rate - self._rate)
        else:
            pace.note_plain()


def _saved(of_rows: float, company: float, num_rows: int) -> float:
    """What a drafted token that is drawn saves: its row of a later step; and that step itself if all others in it get
    ahead too, for a step is made for the slowest."""
    return 1.0 if num_rows <= 1 else of_rows + (1 - of_rows) * company


def _room(sequence: Sequence, demands: Demands) -> int:
    """How many tokens it may draw before its last."""
    return demands.longest_output - len(sequence.output_token_ids) - 1
