"""Beam search and diverse sampling, token by token, for callers who compute the logprobs themselves.

The rules are the engine's. Beams are chosen by a `BeamSearch`; a token's logit loses the diversity penalty once for
every earlier sibling that took the token at the same position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ramify import validation as check
from ramify.engine.search.advance import Candidates
from ramify.engine.search.beam import BeamSearch
from ramify.errors import InvalidInputError
from ramify.sampling_params import MAX_SAMPLES, MAX_TOKENS, SamplingParams

TokenScores = Iterable[tuple[int, float]] | Mapping[int, float]


@dataclass(frozen=True, slots=True)
class BeamState:
    """A beam as it is now. `score` is its logprob / length ** length_penalty, once a search has ranked it."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    finished: bool = False
    score: float | None = None

    def extend(self, token_id: int, logprob: float) -> BeamState:
        """A new beam, longer by one token; this one stays as it is and may be extended again."""
        if self.finished:
            raise InvalidInputError("a finished beam cannot be extended")
        return BeamState((*self.token_ids, token_id), self.cumulative_logprob + logprob)


class _Search(BeamSearch):
    """A beam search whose caller may also end a beam, after any token."""

    def end(self, child: int) -> None:
        for beam_group in self.beam_groups:
            if child in beam_group.running:
                beam_group.add_finished(self._score(beam_group.running.pop(child), self.length), child)
                beam_group.over = self._is_over(beam_group)
                if beam_group.over:
                    beam_group.running = {}

    def running(self) -> set[int]:
        return {child for beam_group in self.beam_groups for child in beam_group.running}


@dataclass(slots=True)
class _Beams:
    search: _Search
    states: dict[int, BeamState] = field(default_factory=lambda: {0: BeamState()})
    listed: list[int] = field(default_factory=lambda: [0])  # the beams as the caller last saw them

    def forget_losers(self) -> None:
        self.states = {
            beam.child: replace(self.states[beam.child], finished=beam.finished, score=beam.score)
            for beam in self.search.ranking()
        }


class BeamSearchManager:
    """Beam searches of many requests, one token at a time.

    `early_stopping` says when a search with `beam_width` finished beams is over. True: at once. False: when the best
    running beam scores no better than the worst finished one. "never": when it would not even with `longest_output`
    tokens.
    """

    def __init__(
        self,
        beam_width: int = 4,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        *,
        end_token_ids: Iterable[int] = (),
        longest_output: int = MAX_TOKENS,
    ) -> None:
        # The checks of these values are SamplingParams' own.
        self._params = SamplingParams(
            strategy="beam_search",
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        self._end_token_ids = frozenset(check.token_ids("end_token_ids", list(end_token_ids), MAX_TOKENS))
        self._longest_output = check.integer("longest_output", longest_output, 1, MAX_TOKENS)
        self._requests: dict[str, _Beams] = {}

    def init_request(self, request_id: str) -> list[BeamState]:
        """Begins a search; returns its only beam, which is empty."""
        if request_id in self._requests:
            raise InvalidInputError(f"request_id {request_id!r} is in use")
        search = _Search(
            beam_width=self._params.resolved_beam_width,
            longest_output=self._longest_output,
            end_token_ids=self._end_token_ids,
            length_penalty=self._params.length_penalty,
            early_stopping=self._params.early_stopping,
        )
        self._requests[request_id] = beams = _Beams(search)
        return list(beams.states.values())

    def update_beams(self, request_id: str, token_scores: Sequence[TokenScores]) -> list[BeamState]:
        """Extends the beams by one token. `token_scores`: for every beam as last returned, likely tokens and logprobs.

        Returns the beams that go on, best first; none when the search is over. The result is exact if each beam's
        scores hold its beam_width likeliest tokens other than end tokens, and every end token likelier than those.
        Scores of a beam that was marked finished in the meantime are ignored.
        """
        beams = self._beams(request_id)
        if len(token_scores) != len(beams.listed):
            raise InvalidInputError(
                f"token_scores must have one entry for each of {len(beams.listed)} beams, got {len(token_scores)}"
            )
        running = beams.search.running()
        candidates = [
            _candidates(child, scores)
            for child, scores in zip(beams.listed, token_scores, strict=True)
            if child in running
        ]
        decisions = beams.search.advance(candidates)
        # All are extended before any is stored: one of them may replace its parent, which others extend too.
        grown = {
            continuation.child: beams.states[continuation.parent].extend(continuation.token_id, continuation.logprob)
            for continuation in (*decisions.continued, *decisions.ended)
        }
        beams.states |= grown
        beams.forget_losers()
        beams.listed = [child for child, state in beams.states.items() if not state.finished]
        return [beams.states[child] for child in beams.listed]

    def mark_finished(self, request_id: str, beam_idx: int) -> None:
        """Ends a beam, for instance at a stop string; `beam_idx` is its index in the list last returned."""
        beams = self._beams(request_id)
        check.integer("beam_idx", beam_idx, 0, len(beams.listed) - 1)
        child = beams.listed[beam_idx]
        if beams.search.length == 0:
            raise InvalidInputError("a beam without tokens cannot be finished")
        if child not in beams.search.running():
            raise InvalidInputError(f"beam {beam_idx} of request {request_id!r} has ended already")
        beams.search.end(child)
        beams.forget_losers()

    def get_best_sequences(self, request_id: str, n: int = 1) -> list[BeamState]:
        """The n best beams with their scores: finished ones first, then, while the search goes on, running ones."""
        check.integer("n", n, 1, MAX_SAMPLES)
        return list(self._beams(request_id).states.values())[:n]

    def finish_request(self, request_id: str) -> None:
        """Forgets a search, whether it is over or not."""
        self._beams(request_id)
        del self._requests[request_id]

    def _beams(self, request_id: str) -> _Beams:
        if request_id not in self._requests:
            raise InvalidInputError(f"there is no request {request_id!r}: init_request begins one")
        return self._requests[request_id]


def _candidates(child: int, scores: TokenScores) -> Candidates:
    pairs = list(scores.items() if isinstance(scores, Mapping) else scores)
    for _, logprob in pairs:
        _check_logprob(logprob)
    pairs.sort(key=lambda pair: -pair[1])  # callers have them in any order
    logprobs = [logprob for _, logprob in pairs]
    return Candidates(child, child, [token_id for token_id, _ in pairs], logprobs, logprobs)


def _check_logprob(logprob: float) -> None:
    """Minus infinity stands for an impossible token; any other logprob must be finite."""
    if logprob != float("-inf"):
        check.number("logprob", logprob)


class DiverseSamplingManager:
    """Siblings that push each other apart: the Hamming penalty of diverse sampling.

    At each position siblings draw in order. Every `group_size` neighbours form a group, like a beam group: a sibling is
    pushed by all earlier groups, not by its own. With 1, the default, all siblings before it push it.
    """

    def __init__(self, diversity_penalty: float = 0.5, group_size: int = 1) -> None:
        self.diversity_penalty = check.number("diversity_penalty", diversity_penalty, 0)
        self.group_size = check.integer("group_size", group_size, 1, MAX_SAMPLES)
        self._outputs: dict[str, list[list[int]]] = {}

    def init_request(self, request_id: str, n: int) -> None:
        check.integer("n", n, 1, MAX_SAMPLES)
        if request_id in self._outputs:
            raise InvalidInputError(f"request_id {request_id!r} is in use")
        self._outputs[request_id] = [[] for _ in range(n)]

    def compute_diversity_penalty(self, request_id: str, sample_idx: int, token_id: int) -> float:
        """What to subtract from the token's logit, before the temperature.

        The penalty, times the number of siblings in earlier groups that took the token at this position.
        """
        outputs = self._siblings(request_id, sample_idx)
        position = len(outputs[sample_idx])
        earlier = outputs[: sample_idx - sample_idx % self.group_size]
        return self.diversity_penalty * sum(output[position : position + 1] == [token_id] for output in earlier)

    def record_token(self, request_id: str, sample_idx: int, token_id: int) -> None:
        """To be called whenever a sibling has drawn a token."""
        self._siblings(request_id, sample_idx)[sample_idx].append(token_id)

    def finish_request(self, request_id: str) -> None:
        """Forgets a request and its siblings."""
        self._siblings(request_id, 0)
        del self._outputs[request_id]

    def _siblings(self, request_id: str, sample_idx: int) -> list[list[int]]:
        if request_id not in self._outputs:
            raise InvalidInputError(f"there is no request {request_id!r}: init_request begins one")
        outputs = self._outputs[request_id]
        check.integer("sample_idx", sample_idx, 0, len(outputs) - 1)
        return outputs
