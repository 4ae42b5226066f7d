"""What comes back: frozen snapshots, never views of an engine's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None


LogprobRow = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation. `index` is the child's number, or the rank where outputs were ranked."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: Sequence[LogprobRow] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds by the engine's clock; None until the moment has come."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All continuations of one prompt, as they stand."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: Sequence[LogprobRow | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
