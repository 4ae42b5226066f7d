"""Draws without replacement by stochastic beam search (Kool et al. 2019, https://arxiv.org/abs/1903.06059), on numbers.

Were every sequence's log-probability raised by a Gumbel number of its own, the n largest sums, its *keys*, would be n
draws without replacement. They are found without listing all sequences: a prefix has the largest key of all that begin
with it, and the keys of its continuations are Gumbel numbers given that the largest of them is its own. So the n
prefixes with the largest keys are kept in every step, finished ones among them.

The largest key that was given up is the threshold: a sequence of log-probability l is among the n if its key exceeds
it, which happens with probability 1 - exp(-exp(l - threshold)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from ramify.engine.search.advance import Candidates, Continuation, Decisions
from ramify.outputs import Inclusion, Standing

NEVER = float("-inf")


class _Prefix(NamedTuple):
    logprob: float  # of the whole, by what it was drawn from
    key: float


class _Extension(NamedTuple):
    prefix: _Prefix
    candidates: Candidates
    place: int  # among these


class WithoutReplacement:
    """One request's sequences. The root, child 0, is what all begin with."""

    def __init__(self, *, num_samples: int, longest_output: int, end_token_ids: frozenset[int]) -> None:
        self.num_samples = num_samples
        self.longest_output = longest_output
        self.end_token_ids = end_token_ids
        self.length = 0
        self.running: dict[int, _Prefix | None] = {0: None}  # nothing is known of the root's key: it is the largest
        self.finished: dict[int, _Prefix] = {}
        self.threshold = NEVER
        self._new_child = count(1)

    def advance(self, candidates: Sequence[Candidates]) -> Decisions:
        """Those of all running prefixes; each one's are ranked by their keys, one more than there are samples."""
        self.length += 1
        extensions = [each for own in candidates for each in self._extensions(own)]
        keys = sorted([*(each.prefix.key for each in extensions), *(each.key for each in self.finished.values())])
        if len(keys) > self.num_samples:
            self.threshold = max(self.threshold, keys[-1 - self.num_samples])
        self.finished = {child: each for child, each in self.finished.items() if each.key > self.threshold}
        chosen = [each for each in extensions if each.prefix.key > self.threshold]
        # Two keys may be equal in floating point: then some of these are one too many.
        chosen = sorted(chosen, key=lambda each: -each.prefix.key)[: self.num_samples - len(self.finished)]
        return self._decide(chosen)

    def kept(self) -> set[int]:
        return {*self.running, *self.finished}

    def ranking(self) -> list[Standing]:
        """The largest keys first: of fewer samples, these would be the samples."""
        known = [Standing(child, each.key, True) for child, each in self.finished.items()]
        known += [Standing(child, 0.0 if each is None else each.key, False) for child, each in self.running.items()]
        return sorted(known, key=lambda standing: -standing.score)

    def inclusion(self, child: int) -> Inclusion | None:
        found = self.finished.get(child) or self.running.get(child)
        return None if found is None else Inclusion(found.logprob, self.threshold)

    def _extensions(self, own: Candidates) -> list[_Extension]:
        assert own.keys is not None, "drawn without replacement"
        parent = self.running[own.parent]
        logprob = 0.0 if parent is None else parent.logprob
        wanted = None if parent is None else parent.key
        largest = logprob + own.keys[0]
        return [
            _Extension(_Prefix(logprob + weight, _given_largest(logprob + key, largest, wanted)), own, place)
            for place, (weight, key) in enumerate(zip(own.weights, own.keys, strict=True))
            if weight > NEVER
        ]

    def _decide(self, chosen: list[_Extension]) -> Decisions:
        self.running = {}
        in_place: set[int] = set()  # parents whose number one of their continuations has taken over
        continued: list[Continuation] = []
        ended: list[Continuation] = []
        for prefix, candidates, place in chosen:
            if self.length >= self.longest_output or candidates.token_ids[place] in self.end_token_ids:
                child = next(self._new_child)
                self.finished[child] = prefix
                ended.append(candidates.take(place, child))
                continue
            child = candidates.parent if candidates.parent not in in_place else next(self._new_child)
            in_place.add(candidates.parent)
            self.running[child] = prefix
            continued.append(candidates.take(place, child))
        return Decisions(continued, ended, over=not self.running)


def _given_largest(key: float, largest: float, wanted: float | None) -> float:
    """A key, given that the largest of its siblings' is `wanted` and not `largest`; None: whatever it is.

    -log(exp(-wanted) - exp(-largest) + exp(-key)), written so that nothing overflows.
    """
    if wanted is None or key >= largest:
        return key if wanted is None else wanted
    lead = wanted - key + math.log1p(-math.exp(key - largest))
    return wanted - max(0.0, lead) - math.log1p(math.exp(-abs(lead)))
