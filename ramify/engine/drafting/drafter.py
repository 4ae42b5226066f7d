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

    @property
    def foreseen(self) -> int | None:
        """The role of the track whose positions it computes while it drafts, so that the step need not; None: none."""

    def serves(self, demands: Demands) -> bool:
        """Whether it can draft for such a request."""

    def draft(self, wanted: Items[Wanted]) -> Items[Items[int]]:
        """Of each, the tokens that it may draw next, or what stands for them; none where nothing is known."""

    def forget(self, sequence: Sequence) -> None:
        """It computes nothing more; it may never have been drafted for."""

    def end(self, request_id: str) -> None:
        """All its sequences have ended."""

    def reset(self) -> None:
        """All sequences are gone."""


class Standing(NamedTuple):
    """A sequence that is drafted for, as it stands when the step under way is recorded."""

    sequence: Sequence
    demands: Demands
    num_output: int
    last_token_id: int


class EarlyDrafter(Drafter, Protocol):
    """Drafts on the device, as many tokens for all sequences, and can begin before a step is recorded."""

    @property
    def most_positions(self) -> int:
        """How many it can compute: for every sequence one more than it drafts."""

    def draft_next(self, standings: Items[Standing], num_drafted: int, length: int) -> None:
        """For the step after the one under way, as soon as that is known: it checks this many drafted tokens of all
        these sequences, which stand as they did before it. Does nothing where that cannot be."""

    def confirm(self, standings: Items[Standing]) -> None:
        """Those of them who go on, as they stand now: they have these drafts when they are asked for."""

    @property
    def is_ahead(self) -> bool:
        """Whether it has drafted for the next step."""
