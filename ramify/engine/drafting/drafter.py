"""What guesses the next tokens of sequences. A guess costs time when it is wrong, and never changes what is drawn."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from ramify.engine.demands import Demands
from ramify.engine.sequence import Sequence


class Wanted(NamedTuple):
    """For a sequence that has drawn at least one token: its next ones, as many as `most`, or fewer."""

    sequence: Sequence
    demands: Demands
    most: int


class Drafter(Protocol):
    @property
    def cost(self) -> float:
        """What drafting one token takes, in steps of the models that are drafted for."""

    def draft(self, wanted: Items[Wanted]) -> list[list[int]]:
        """Of each, the tokens that it may draw next; none where nothing is known."""

    def forget(self, sequence: Sequence) -> None:
        """It computes nothing more; it may never have been drafted for."""

    def end(self, request_id: str) -> None:
        """All its sequences have ended."""

    def reset(self) -> None:
        """All sequences are gone."""
