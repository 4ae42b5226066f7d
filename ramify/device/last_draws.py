"""Where the last step's draws were made, for those who go on from a token that the host does not know."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ramify.device.reads import Int64s
from ramify.engine.plan import Plan

NO_ROW = -1


def _no_rows() -> Int64s:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class LastDraws:
    plan: Plan = field(default_factory=lambda: Plan([]))
    rows: Int64s = field(default_factory=_no_rows)  # of each draw; NO_ROW: nobody goes on from it unseen
    guesses: Int64s = field(default_factory=_no_rows)  # where the tokens are that GUESS, GUESS - 1, … stand for

    def by_track(self) -> dict[str, int]:
        """The rows of tracks."""
        plan, rows = self.plan, iter(self.rows.tolist())
        row_of = {} if plan.onward is None else dict(zip(plan.onward.keys(), rows, strict=False))
        for draw, row in zip(plan.draws, rows, strict=True):
            if row != NO_ROW:
                row_of |= {plan.works[model].chunks[chunk].key: row for model, chunk, _ in draw.rows}
        return row_of
