"""StudentDrafter: the student of a mixture drafts in its own track's blocks.

Its passes are a part of the step that checks them: what it computes while it drafts is what the step would compute for
its track, so that only the teacher has something left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ramify.drive.chained_drafter import ChainedDrafter
from ramify.engine.drafting.drafter import Standing


class StudentDrafter(ChainedDrafter):
    @property
    def foreseen(self) -> int:
        """Its track's role."""
        return self._role

    def _catch_up(self, _standings: Items[Standing]) -> None:
        """Its track lacks the last position alone: that of any sequence that is drafted for."""

    def _is_ready(self, _each: Standing, _start: int) -> bool:
        return True

    def _note(self, _each: Standing, _end: int) -> None:
        """The step that checks the drafts counts them."""
