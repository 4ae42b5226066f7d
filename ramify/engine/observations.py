"""Observations: how long requests waited, how much they asked for, and how they ended, counted where they are served.

Plain numbers, so that whoever shows them may sit in another process, and any number of those show the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from ramify.engine.metrics import FinishedRequest, IterationStats
from ramify.outputs import RequestOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536)


@dataclass(slots=True)
class Distribution:
    """How many values lie up to each bound and beyond the one before it, the last beyond all; and their sum."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Distribution:
        return cls([0] * (len(bounds) + 1))

    def add(self, values: Iterable[float], bounds: tuple[float, ...]) -> None:
        for value in values:
            self.counts[bisect_left(bounds, value)] += 1
            self.total += value


def _seconds() -> Distribution:
    return Distribution.over(SECONDS)


def _tokens() -> Distribution:
    return Distribution.over(TOKENS)


@dataclass(slots=True)
class Observations:
    """Since the engine started. Written by the engine's thread; others may read it."""

    queued: Distribution = field(default_factory=_seconds)  # from arrival to the first step
    first: Distribution = field(default_factory=_seconds)  # from arrival to the first token
    between: Distribution = field(default_factory=_seconds)  # from one token of a sample to the next
    whole: Distribution = field(default_factory=_seconds)  # from arrival to the end
    prompts: Distribution = field(default_factory=_tokens)  # tokens of prompts
    outputs: Distribution = field(default_factory=_tokens)  # tokens drawn for a request, those of losers included
    ends: dict[str, int] = field(default_factory=dict)  # by the reason of the first sample

    def stepped(self, step: IterationStats) -> None:
        self.queued.add(step.queue_times, SECONDS)
        self.first.add(step.time_to_first_tokens, SECONDS)
        self.between.add(step.inter_token_latencies, SECONDS)
        self.finished(step.finished_requests)

    def finished(self, requests: Iterable[FinishedRequest]) -> None:
        """Whatever kind of outputs they had: of a stream the last one holds only the last tokens."""
        for request in requests:
            self.whole.add([request.e2e_latency], SECONDS)
            self.prompts.add([request.num_prompt_tokens], TOKENS)
            self.outputs.add([request.num_generation_tokens], TOKENS)

    def ended(self, output: RequestOutput) -> None:
        reason = next((sample.finish_reason for sample in output.outputs if sample.finish_reason is not None), None)
        name = "abort" if reason is None else reason.value
        self.ends[name] = self.ends.get(name, 0) + 1


@dataclass(frozen=True, slots=True)
class EngineState:
    """What there is to know of an engine at a moment."""

    stats: dict[str, int]
    num_unfinished: int  # requests, of everybody who uses it
    observations: Observations
    models: list[dict[str, int]] = field(default_factory=list)  # what each model computed for its tracks
    replicas: list[dict[str, int]] = field(default_factory=list)  # where several engines are one: the stats of each
