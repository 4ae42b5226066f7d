"""Each step of the engine fills an IterationStats, and EngineMetrics adds them up."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from ramify.outputs import FinishReason


class Parent(Protocol):
    """What `observe_parallel_sampling` reads of a request."""

    @property
    def n(self) -> int: ...

    @property
    def best_of(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended: its seconds from arrival to end, and its tokens."""

    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    finish_reason: FinishReason
    num_cached_tokens: int = 0


@dataclass(slots=True)
class TrackCounts:
    """What one model computed for its tracks of all sequences."""

    num_positions: int = 0  # of prompts and outputs
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache

    def add(self, other: TrackCounts) -> None:
        self.num_positions += other.num_positions
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens


def _by_role() -> defaultdict[int, TrackCounts]:
    return defaultdict(TrackCounts)


@dataclass(slots=True)
class IterationStats:
    """The facts of one step. Times are seconds by the engine's clock."""

    timestamp: float = 0.0
    tracks: defaultdict[int, TrackCounts] = field(default_factory=_by_role)
    num_generation_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # drafted tokens that were drawn
    num_preempted: int = 0
    queue_times: list[float] = field(default_factory=list)
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequest] = field(default_factory=list)
    n_params: list[int] = field(default_factory=list)
    best_of_params: list[int] = field(default_factory=list)
    max_num_generation_tokens: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Computed in this step."""
        return sum(counts.num_prompt_tokens for counts in self.tracks.values())

    @property
    def num_cached_tokens(self) -> int:
        """Found in the prefix cache, so not computed."""
        return sum(counts.num_cached_tokens for counts in self.tracks.values())

    def record_finished_request(
        self,
        e2e_latency: float,
        num_prompt_tokens: int,
        num_generation_tokens: int,
        finish_reason: FinishReason,
        num_cached_tokens: int = 0,
    ) -> None:
        self.finished_requests.append(
            FinishedRequest(e2e_latency, num_prompt_tokens, num_generation_tokens, finish_reason, num_cached_tokens)
        )

    def record_queue_time(self, latency: float) -> None:
        self.queue_times.append(latency)

    def record_first_token(self, latency: float) -> None:
        self.time_to_first_tokens.append(latency)

    def record_inter_token_latency(self, latency: float) -> None:
        self.inter_token_latencies.append(latency)

    def observe_parallel_sampling(self, parent: Parent, num_generation_tokens: int) -> None:
        """Once per request, when its last sample has ended: how many samples, and the length of the longest."""
        self.n_params.append(parent.n)
        self.best_of_params.append(parent.n if parent.best_of is None else parent.best_of)
        self.max_num_generation_tokens.append(num_generation_tokens)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Totals since the engine started."""

    steps: int = 0
    tracks: defaultdict[int, TrackCounts] = field(default_factory=_by_role)
    generated_tokens: int = 0
    preemptions: int = 0
    requests_finished: int = 0
    blocks_in_use_peak: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def after(self, step: IterationStats, blocks_in_use: int) -> EngineMetrics:
        """The totals after one more step; these stay, so that no step is ever counted in part."""
        tracks = _by_role()
        for counted in (self.tracks, step.tracks):
            for role, counts in counted.items():
                tracks[role].add(counts)
        return EngineMetrics(
            self.steps + 1,
            tracks,
            self.generated_tokens + step.num_generation_tokens,
            self.preemptions + step.num_preempted,
            self.requests_finished + len(step.finished_requests),
            max(self.blocks_in_use_peak, blocks_in_use),
            self.drafted_tokens + step.num_drafted_tokens,
            self.accepted_tokens + step.num_accepted_tokens,
        )

    @property
    def prompt_tokens_computed(self) -> int:
        return sum(counts.num_prompt_tokens for counts in self.tracks.values())

    @property
    def prompt_tokens_cached(self) -> int:
        return sum(counts.num_cached_tokens for counts in self.tracks.values())

    def as_dict(self) -> dict[str, int]:
        return {
            name: getattr(self, name)
            for name in (
                "steps",
                "prompt_tokens_computed",
                "prompt_tokens_cached",
                "generated_tokens",
                "drafted_tokens",
                "accepted_tokens",
                "preemptions",
                "requests_finished",
                "blocks_in_use_peak",
            )
        }
