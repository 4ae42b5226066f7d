"""Together: speculation where all sequences of a step are drafted for at once, on a device that runs ahead without.

The drafts for a step are made ready while the one before is under way, and launched as soon as that one's tokens are
known: while the device drafts, the host records, decides and plans.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ramify.engine.demands import Demands
from ramify.engine.drafting.drafter import EarlyDrafter, Standing, Wanted
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.drafting.tempo import Tempo
from ramify.engine.plan import GUESS, Draw, StepResult
from ramify.engine.schedule import Schedule
from ramify.engine.sequence import Sequence

SIZES = 8  # rows: steps of nearly as many take the same time
LONGEST_REST = 32  # steps after a look that found nobody to draft for


class Together(Speculation):
    def __init__(self, drafter: EarlyDrafter) -> None:
        self.tempo = Tempo(drafter.cost)
        self._early = drafter
        self.most_draws = drafter.most_positions
        super().__init__(drafter, row_cost=0.0)

    def reset(self) -> None:
        """What is known of times and rates stays."""
        super().reset()
        self._num_rows = 0  # of the last step without prompts
        self._share = 1.0  # of its sequences that could be drafted for
        self._last_time: float | None = None  # when that was known, if no other step came after it
        self._last_length = 0
        self._rest = self._longest_rest = 0

    def begin(self, request_id: str, demands: Demands) -> None:
        super().begin(request_id, demands)
        if request_id in self._open:
            self._share = 1.0

    # -- steps -----------------------------------------------------------------------------------------------

    def rests(self) -> bool:
        """Whether a step may be decided before the one under way is known, and so without drafts; counts it."""
        if not self._open or self._rest > 0:
            self._rest -= 1
            return True
        return not self._length(self._num_rows)

    def draft(self, able: Items[Sequence], *, num_rows: int, budget: int) -> None:
        """Tokens for all of these sequences that can be drafted for, or those that were drafted ahead."""
        most = budget // num_rows if num_rows else 0
        length = most if self._early.is_ahead else min(self._length(num_rows), most)
        wanted: list[Wanted] = []
        if not length:
            self._early.draft(wanted)  # what was drafted ahead counts for this step or for none
            return
        for sequence in able:
            known = self._open.get(sequence.request_id)
            if known is not None:
                wanted.append(Wanted(sequence, known.demands, length))
        self._share = len(wanted) / num_rows
        drafts = self._early.draft(wanted)
        for each, drafted in zip(wanted, drafts, strict=True):
            each.sequence.drafted = drafted[:most]
        self._longest_rest = 0 if any(drafts) else min(2 * self._longest_rest + 1, LONGEST_REST)
        self._rest = self._longest_rest

    def note_launched(self, schedule: Schedule, draws: Items[Draw], drawing: Items[Sequence]) -> None:
        """Where a step checks drafts, those of the next one are made ready."""
        if not schedule.num_drafted or self._has_joined(schedule):
            return
        standings, num_drafted = [], 0
        for draw, sequence in zip(draws, drawing, strict=True):
            if not draw.presumed and sequence.drafted:
                standings.append(Standing(sequence, draw.demands, draw.position, draw.output[-1]))
                num_drafted = len(sequence.drafted)
        length = self._length(len(standings))
        if length:
            self._early.draft_next(standings, num_drafted, length)

    def note_step(
        self, schedule: Schedule, draws: Items[Draw], drawing: Items[Sequence], result: StepResult, now: float
    ) -> None:
        """A step is known, and not yet recorded: it is counted, and drafts for the next one are under way."""
        has_prompts = any(counts.num_prompt_tokens for counts in schedule.tracks.values())
        num_rows, length, num_right = len(schedule.sequences), 0, 0
        if schedule.going_on is not None:
            num_rows += len(schedule.going_on.children)
        standings: list[Standing] = []
        if schedule.num_drafted and not result.faults:
            standings, length, num_right = self._checked(draws, drawing, result)
        if num_rows and not has_prompts:
            self._num_rows = num_rows
            if self._last_time is not None:
                drawn, alike = 1 + num_right / num_rows, (length > 0) == (self._last_length > 0)
                self.tempo.note_time(_size(num_rows), length, now - self._last_time, drawn, follows_its_like=alike)
        self._last_time = None if has_prompts or not num_rows else now
        self._last_length = length
        self._early.confirm(standings)

    def _has_joined(self, schedule: Schedule) -> bool:
        """Whether somebody was not drafted for who can be: the next drafts are for all, once they are known."""
        return any(
            caught_up and not sequence.drafted and sequence.request_id in self._open
            for sequence, _, caught_up in schedule.sequences
        )

    def _checked(
        self, draws: Items[Draw], drawing: Items[Sequence], result: StepResult
    ) -> tuple[list[Standing], int, int]:
        """Where those go on that were drafted for, how many tokens each of them had, and how many were right in all."""
        standings: list[Standing] = []
        length = num_tried = num_right = num_rows = 0
        first = len(result.token_ids) - len(draws)
        for index, (draw, sequence) in enumerate(zip(draws, drawing, strict=True)):
            drafted = sequence.drafted
            if draw.presumed or not drafted or drafted[0] > GUESS:
                continue
            own = result.token_ids[first + index : first + index + len(drafted) + 1]
            right = 0
            while right < len(drafted) and own[right] == result.guesses[GUESS - drafted[right]]:
                right += 1
            num_rows, num_right, length = num_rows + 1, num_right + right, max(length, len(drafted))
            num_tried += min(len(drafted), right + 1)
            num_output, demands = draw.position + right + 1, draw.demands
            is_over = num_output >= demands.longest_output or not demands.end_token_ids.isdisjoint(own[: right + 1])
            if not is_over and not sequence.is_finished():
                standings.append(Standing(sequence, demands, num_output, own[right]))
        self.tempo.note_drafts(num_tried, num_right, num_rows)
        return standings, length, num_right

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """All is known from the step."""

    def _length(self, num_rows: int) -> int:
        if not num_rows:
            return 0
        return self.tempo.length(_size(num_rows), self._early.most_positions // num_rows - 1, self._share)


def _size(num_rows: int) -> int:
    return -(-num_rows // SIZES) * SIZES if num_rows > SIZES else num_rows
