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

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count
from typing import Literal, NamedTuple

from ramify.engine.plan import quickly
from ramify.engine.search.advance import Candidates, Continuation, Decisions
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
    """A beam with one of its candidates."""

    total: float  # the sum of its weights then
    token_id: int
    candidates: Candidates
    place: int  # among its candidates


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

    def advance(self, candidates: Sequence[Candidates]) -> Decisions:
        """Those of all running beams, in any order; each beam's are its likeliest tokens."""
        self.length += 1
        by_parent = {each.parent: each for each in candidates}
        in_place: set[int] = set()  # parents whose number one of their continuations has taken over
        taken: Counter[int] = Counter()  # by token, how many beams of earlier beam groups took it
        continued: list[Continuation] = []
        ended: list[Continuation] = []
        for beam_group in self.beam_groups:
            if beam_group.over:
                continue
            best: list[_Extension] = []  # as many as it takes to find `width` that do not end
            running: list[_Extension] = []
            for extension in self._extensions(beam_group, by_parent, taken):
                best.append(extension)
                if not self._ends(extension):
                    running.append(extension)
                    if len(running) == beam_group.width:
                        break
            if len(best) > len(running):
                ended += self._finish(beam_group, best[: beam_group.width])
            beam_group.running = {}
            for total, _, of_parent, index in running:
                child = self._name(of_parent.parent, in_place)
                beam_group.running[child] = total
                continued.append(of_parent.take(index, child))
            if len(self.beam_groups) > 1:
                # At the longest output every beam ends, but it took a token too.
                taken.update(extension.token_id for extension in running or best[: beam_group.width])
            beam_group.over = self._is_over(beam_group)
            if beam_group.over:
                gone = set(beam_group.running)
                continued = [continuation for continuation in continued if continuation.child not in gone]
                beam_group.running = {}
        if ended:
            kept = self.kept()
            ended = [continuation for continuation in ended if continuation.child in kept]
        return Decisions(continued, ended, over=all(beam_group.over for beam_group in self.beam_groups))

    def kept(self) -> set[int]:
        """Who runs, and the finished beams that none outdid.

        `ranking` names the same, scored and sorted: asking it in every step took 0.07 ms of 4 for 64 beams.
        """
        kept: set[int] = set()
        for beam_group in self.beam_groups:
            kept.update(beam_group.running, [beam.child for beam in beam_group.finished])
        return kept

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

    def inclusion(self, child: int) -> None:
        """Beams are not drawn."""

    # -- one beam group --------------------------------------------------------------------------------------

    def _extensions(
        self, beam_group: BeamGroup, by_parent: dict[int, Candidates], taken: Counter[int]
    ) -> Iterator[_Extension]:
        """Its continuations, best first, without impossible tokens.

        Sorts totals alone, and makes only what is asked for: of the 72 of eight beams, hardly more than eight.
        """
        beams = [(by_parent[parent], total) for parent, total in beam_group.running.items() if parent in by_parent]
        totals = [total + weight for candidates, total in beams for weight in candidates.weights]
        if taken:
            token_ids = chain.from_iterable(candidates.token_ids for candidates, _ in beams)
            penalty = self.diversity_penalty
            totals = [total - penalty * taken[token] for total, token in zip(totals, token_ids, strict=True)]
        ends = list(accumulate(len(candidates.weights) for candidates, _ in beams))
        for place in sorted(range(len(totals)), key=totals.__getitem__, reverse=True):
            beam = bisect_right(ends, place)
            candidates = beams[beam][0]
            index = place - ends[beam]  # from the end of its candidates
            if candidates.weights[index] > IMPOSSIBLE:
                yield quickly(_Extension, (totals[place], candidates.token_ids[index], candidates, index))

    def _finish(self, beam_group: BeamGroup, best: list[_Extension]) -> list[Continuation]:
        """Makes finished beams of those among the best that end; returns all of these."""
        ended = []
        for total, _, candidates, index in filter(self._ends, best):
            child = next(self._new_child)
            beam_group.add_finished(self._score(total, self.length), child)
            ended.append(candidates.take(index, child))
        return ended

    def _ends(self, extension: _Extension) -> bool:
        return self.length >= self.longest_output or extension.token_id in self.end_token_ids

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
