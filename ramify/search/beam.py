"""Beam search and diverse (group) beam search, on numbers alone.

Each step the likeliest continuations of all running beams of a group stand in one list, best first. Of its first
`width` entries those that end join the finished ones, which are kept sorted by score = sum of logprobs / length **
length_penalty, `width` of them. The best entries that do not end are the next running beams. Groups advance in order,
and a token loses `diversity_penalty` for every beam with which an earlier group goes on by it in the same step.

These are the rules of `transformers`' beam search, group by group; so is the question when to stop:

    early_stopping   a group is over when it has `width` finished beams and ...
    True             ... nothing more is asked
    False            ... the best running beam, at its present length, scores no better than the worst of them
    "never"          ... the best running beam scores no better even at the best length it could still reach
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

from ramify.outputs import Standing
from ramify.search.advance import Candidate, Continuation, Decisions


class Finished(NamedTuple):
    score: float
    child: int


@dataclass(slots=True)
class BeamGroup:
    """Beams that compete with each other: running ones with the sum of their weights, finished ones best first."""

    width: int
    running: dict[int, float] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    over: bool = False


class _Extension(NamedTuple):
    total: float
    candidate: Candidate


class BeamSearch:
    """One request's beams. The root, child 0, is the first beam of every group."""

    def __init__(
        self,
        *,
        beam_width: int,
        longest_output: int,
        end_token_ids: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        num_groups: int = 1,
        diversity_penalty: float = 0.0,
    ) -> None:
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.end_token_ids = end_token_ids
        self.longest_output = longest_output
        self.diversity_penalty = diversity_penalty
        self.length = 0
        self.groups = [BeamGroup(beam_width // num_groups, {0: 0.0}) for _ in range(num_groups)]
        self._new_child = count(1)

    def advance(self, candidates: Sequence[Candidate]) -> Decisions:
        """Candidates of all running beams, in any order; each beam's are its likeliest tokens."""
        self.length += 1
        by_parent: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            by_parent.setdefault(candidate.parent, []).append(candidate)
        in_place: set[int] = set()  # parents that one continuation goes on from in place
        taken: dict[int, int] = {}  # how many running beams of earlier groups took a token
        continued: list[Continuation] = []
        ended: list[Continuation] = []
        for group in self.groups:
            if group.over:
                continue
            extensions = self._extensions(group, by_parent, taken)
            finished = self._finish(group, extensions)
            running = [item for item in extensions if not self._ends(item)][: group.width]
            group.running = {}
            for total, candidate in running:
                child = self._name(candidate.parent, in_place)
                group.running[child] = total
                continued.append(candidate._replace(child=child))
            for _, candidate in (
                running or extensions[: group.width]
            ):  # at the last length all end, and took a token too
                taken[candidate.token_id] = taken.get(candidate.token_id, 0) + 1
            ended += finished
            group.over = self._is_over(group)
            if group.over:
                gone = set(group.running)
                continued = [item for item in continued if item.child not in gone]
                group.running = {}
        kept = {item.child for group in self.groups for item in group.finished}
        ended = [item for item in ended if item.child in kept]
        return Decisions(continued, ended, over=all(group.over for group in self.groups))

    def ranking(self) -> list[Standing]:
        """Finished beams of all groups by score, then, while the search goes on, running ones by theirs so far."""
        finished = [
            Standing(item.child, item.score, True, number)
            for number, group in enumerate(self.groups)
            for item in group.finished
        ]
        running = [
            Standing(child, self._score(total, self.length) if self.length else 0.0, False, number)
            for number, group in enumerate(self.groups)
            for child, total in group.running.items()
        ]
        return sorted(finished, key=_by_score) + sorted(running, key=_by_score)

    # -- one group -------------------------------------------------------------------------------------------

    def _extensions(
        self, group: BeamGroup, by_parent: dict[int, list[Candidate]], taken: dict[int, int]
    ) -> list[_Extension]:
        """The group's continuations, best first; a token without probability is none."""
        extensions = [
            _Extension(total + candidate.weight - self.diversity_penalty * taken.get(candidate.token_id, 0), candidate)
            for parent, total in group.running.items()
            for candidate in by_parent.get(parent, ())
            if candidate.weight > float("-inf")
        ]
        return sorted(extensions, key=lambda item: -item.total)

    def _finish(self, group: BeamGroup, extensions: list[_Extension]) -> list[Continuation]:
        """Takes what ends among the first `width` into the finished beams; returns what was taken."""
        ended = []
        for total, candidate in filter(self._ends, extensions[: group.width]):
            child = next(self._new_child)
            group.finished.append(Finished(self._score(total, self.length), child))
            ended.append(candidate._replace(child=child))
        group.finished.sort(key=lambda item: -item.score)
        del group.finished[group.width :]
        return ended

    def _ends(self, item: _Extension) -> bool:
        return self.length >= self.longest_output or item.candidate.token_id in self.end_token_ids

    def _is_over(self, group: BeamGroup) -> bool:
        if not group.running:
            return True
        if len(group.finished) < group.width:
            return False
        if self.early_stopping is True:
            return True
        reach = self.length
        if self.early_stopping == "never" and self.length_penalty > 0:
            reach = self.longest_output
        return self._score(max(group.running.values()), reach) <= group.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        try:
            divisor: float = float(length) ** self.length_penalty
            return total / divisor
        except OverflowError:  # an infinite divisor
            return 0.0
        except ZeroDivisionError:
            return float("-inf") if total < 0 else 0.0

    def _name(self, parent: int, in_place: set[int]) -> int:
        """The parent's own number for the first that goes on from it, new ones for others."""
        if parent in in_place:
            return next(self._new_child)
        in_place.add(parent)
        return parent


def _by_score(item: Standing) -> float:
    return -item.score
