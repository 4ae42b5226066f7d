"""The one signature of all strategies: `advance(candidates) -> decisions`, a function of what was drawn.

A child is a number. A decision whose child is its parent goes on in place; one with another number forks the parent;
a parent that no decision names goes no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ramify.engine.plan import TokenReport
from ramify.outputs import MixtureReport, Standing


class Candidate(NamedTuple):
    """A token that may follow the last one of `parent`, as the next of `child`."""

    parent: int
    child: int
    token_id: int
    logprob: float  # by the model's own distribution
    weight: float = 0.0  # by the distribution after all controls: what beams add up
    report: TokenReport | None = None
    mixture: MixtureReport | None = None  # where two models were mixed


# What a strategy makes of candidates: `child` goes on from `parent` with this token.
Continuation = Candidate


class Decisions(NamedTuple):
    """Who goes on, which continuations are complete and go no further, and whether nothing is left to do."""

    continued: list[Continuation]
    ended: list[Continuation]
    over: bool


class Strategy(Protocol):
    def advance(self, candidates: Sequence[Candidate]) -> Decisions: ...

    def ranking(self) -> list[Standing] | None:
        """Children and scores, best first, where the strategy itself decides which outputs count; else None."""
        ...


class Independent:
    """Parallel, best-of-n and diverse sampling: every child keeps what was drawn for it.

    They differ elsewhere: best-of-n in what is returned, diverse sampling in what the draws saw of each other.
    """

    def advance(self, candidates: Sequence[Candidate]) -> Decisions:
        return Decisions(list(candidates), [], over=False)

    def ranking(self) -> list[Standing] | None:
        return None
