"""Beam search and diverse beam search, on numbers alone.

Beams compete within their beam group. In each step the likeliest continuations of all its running beams are sorted,
best first. Those among the first `width` that end become finished beams, of which the `width` best are kept, by score =
sum of logprobs / length ** length_penalty. The first `width` that do not end are the next running beams. Beam groups
advance in order, and a token loses `diversity_penalty` for every beam of an earlier beam group that took it in the same
step.

These are the rules of `transformers`' beam search for each beam group, and so is the rule when to stop:

    early_stopping   a beam group is over when it has `width` finished beams and ...
    True             ... nothing more is asked
    False            ... the best running beam, at its present length, scores no better than the worst of them
    "never"          ... the best running beam scores no better even at the best length it could still reach
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Literal, NamedTuple

from ramify.engine.plan import quickly
from ramify.engine.search.advance import Candidate, Continuation, Decisions
from ramify.outputs import Standing

IMPOSSIBLE = float("-inf")  # the weight of a token that controls or filters rule out


class Finished(NamedTuple):
    score: float
    child: int


@dataclass(slots=True)
class BeamGroup:
    """Beams that compete: the running ones with the sum of their weights, the finished ones best first."""

    width: int
    running: dict[int, float] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    over: bool = False

    def add_finished(self, score: float, child: int) -> None:
        """Keeps the `width` best."""
        self.finished.append(Finished(score, child))
        self.finished.sort(key=_by_score)
        del self.finished[self.width :]


class _Extension(NamedTuple):
    total: float
    candidate: Candidate


class BeamSearch:
    """One request's beams. The root, child 0, is the first beam of every beam group."""

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
        self.beam_groups = [BeamGroup(beam_width // num_groups, {0: 0.0}) for _ in range(num_groups)]
        self._new_child = count(1)

    def advance(self, candidates: Sequence[Candidate]) -> Decisions:
        """Candidates of all running beams, in any order; each beam's are its likeliest tokens."""
        self.length += 1
        by_parent: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            by_parent.setdefault(candidate.parent, []).append(candidate)
        in_place: set[int] = set()  # parents whose number one of their continuations has taken over
        taken: dict[int, int] = {}  # by token, how many beams of earlier beam groups took it
        continued: list[Continuation] = []
        ended: list[Continuation] = []
        for beam_group in self.beam_groups:
            if beam_group.over:
                continue
            extensions = self._extensions(beam_group, by_parent, taken)
            finished = self._finish(beam_group, extensions)
            running = [extension for extension in extensions if not self._ends(extension)][: beam_group.width]
            beam_group.running = {}
            for total, candidate in running:
                child = self._name(candidate.parent, in_place)
                beam_group.running[child] = total
                continued.append(candidate._replace(child=child))
            # At the longest output every beam ends, but it took a token too.
            for _, candidate in running or extensions[: beam_group.width]:
                taken[candidate.token_id] = taken.get(candidate.token_id, 0) + 1
            ended += finished
            beam_group.over = self._is_over(beam_group)
            if beam_group.over:
                gone = set(beam_group.running)
                continued = [continuation for continuation in continued if continuation.child not in gone]
                beam_group.running = {}
        kept = {beam.child for beam_group in self.beam_groups for beam in beam_group.finished}
        ended = [continuation for continuation in ended if continuation.child in kept]
        return Decisions(continued, ended, over=all(beam_group.over for beam_group in self.beam_groups))

    def ranking(self) -> list[Standing]:
        """Finished beams of all beam groups, best first; then running ones, by their score so far."""
        finished = [
            Standing(beam.child, beam.score, True, number)
            for number, beam_group in enumerate(self.beam_groups)
            for beam in beam_group.finished
        ]
        running = [
            Standing(child, self._score(total, self.length) if self.length else 0.0, False, number)
            for number, beam_group in enumerate(self.beam_groups)
            for child, total in beam_group.running.items()
        ]
        return sorted(finished, key=_by_score) + sorted(running, key=_by_score)

    # -- one beam group --------------------------------------------------------------------------------------

    def _extensions(
        self, beam_group: BeamGroup, by_parent: dict[int, list[Candidate]], taken: dict[int, int]
    ) -> list[_Extension]:
        """Its continuations, best first, without impossible tokens."""
        extensions = [
            quickly(_Extension, (total + candidate.weight, candidate))
            for parent, total in beam_group.running.items()
            for candidate in by_parent.get(parent, ())
            if candidate.weight > IMPOSSIBLE
        ]
        if taken:
            penalty = self.diversity_penalty
            extensions = [
                _Extension(total - penalty * taken.get(candidate.token_id, 0), candidate)
                for total, candidate in extensions
            ]
        return sorted(extensions, key=itemgetter(0), reverse=True)

    def _finish(self, beam_group: BeamGroup, extensions: list[_Extension]) -> list[Continuation]:
        """Makes finished beams of those among the first `width` that end; returns all of these."""
        ended = []
        for total, candidate in filter(self._ends, extensions[: beam_group.width]):
            child = next(self._new_child)
            beam_group.add_finished(self._score(total, self.length), child)
            ended.append(candidate._replace(child=child))
        return ended

    def _ends(self, extension: _Extension) -> bool:
        return self.length >= self.longest_output or extension.candidate.token_id in self.end_token_ids

    def _is_over(self, beam_group: BeamGroup) -> bool:
        if not beam_group.running:
            return True
        if len(beam_group.finished) < beam_group.width:
            return False
        if self.early_stopping is True:
            return True
        reach = self.length
        if self.early_stopping == "never" and self.length_penalty > 0:
            reach = self.longest_output
        return self._score(max(beam_group.running.values()), reach) <= beam_group.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        try:
            divisor: float = float(length) ** self.length_penalty
            return total / divisor
        except OverflowError:  # an infinite divisor
            return 0.0
        except ZeroDivisionError:
            return float("-inf") if total < 0 else 0.0

    def _name(self, parent: int, in_place: set[int]) -> int:
        """The number of a continuation: the parent's own for the first one, a new one for every other."""
        if parent in in_place:
            return next(self._new_child)
        in_place.add(parent)
        return parent


def _by_score(beam: Standing | Finished) -> float:
    return -beam.score
