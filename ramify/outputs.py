"""What callers get back: frozen snapshots, never views of an engine's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from ramify.errors import InvalidInputError
from ramify.foreign.truth import Truth
from ramify.notebook import cards


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def finite(number: float | None) -> float | None:
    """A number for JSON, which has no infinity: null stands for it."""
    return number if number is not None and math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None


LogprobRow = dict[int, Logprob]
MOST_EXPONENT = 30.0  # exp(-exp(30)) is 0


class MixtureReport(NamedTuple):
    """How two models were mixed for one token, and how likely each found it.

    Every number is about the distributions as they were mixed: after controls and temperature, on the common support.
    """

    alpha: float  # the teacher's weight
    log_z: float
    kl_theta: float  # KL(q || student)
    kl_teacher: float  # KL(q || teacher)
    ess_theta: float
    ess_teacher: float
    logprob_theta: float
    logprob_teacher: float
    is_clamped: bool  # alpha is alpha_min or alpha_max because the method wanted to go beyond it


class Kept(NamedTuple):
    """What a token was drawn from: the tokens that top-k and the other rules that cut had left."""

    mass: float  # theirs, in the distribution that was cut: after controls, temperature and smoothing
    token_ids: tuple[int, ...] | None = None  # all of them, ascending, if they were asked for


class Inclusion(NamedTuple):
    """How a sequence that was drawn without replacement came to be among the samples."""

    logprob: float  # of the whole sequence, by what it was drawn from
    threshold: float  # the largest key that is not among the samples; minus infinity: all sequences are

    @property
    def probability(self) -> float:
        """That it is among the samples, given the threshold."""
        lead = self.logprob - self.threshold
        return 1.0 if lead > MOST_EXPONENT else -math.expm1(-math.exp(lead))

    @property
    def weight(self) -> float:
        """Summed over the samples, weight times f(sample) is an unbiased estimate of the expectation of f."""
        return math.exp(self.logprob) / self.probability if self.probability else math.exp(self.threshold)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a model asks for; `arguments` are a JSON object, as text."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """As it stands in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation. `index` is the child's number or, where outputs were ranked, the rank.

    `mixture` has one entry per token if two models were mixed, else it is None. `inclusion` is of samples that were
    drawn without replacement. `kept` has one entry per token with `return_kept`; `processed_logprobs` stand beside
    `logprobs` with `logprobs_mode="both"`. `tool_calls` are what was found in the text of a chat with tools, once it is
    whole; the text itself stays as the model wrote it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: Sequence[LogprobRow] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    mixture: tuple[MixtureReport, ...] | None = None
    inclusion: Inclusion | None = None
    kept: tuple[Kept, ...] | None = None
    processed_logprobs: Sequence[LogprobRow] | None = None
    tool_calls: tuple[ToolCall, ...] | None = None

    @property
    def finished(self) -> Truth:
        """Whether it has ended; may be called too."""
        return Truth(self.finish_reason is not None)

    def is_empty(self) -> bool:
        """Whether it says nothing: no token came before the one that ended it.

        An EOS or stop token is among the tokens, a stop string is not. An output with text is never empty.
        """
        ended_by_token = self.finish_reason is FinishReason.STOP and not isinstance(self.stop_reason, str)
        return not self.token_ids or (len(self.token_ids) == int(ended_by_token) and not self.text)

    def append(self, token_id: int, text: str, logprob: float) -> CompletionOutput:
        """A new output, longer by one token; this one stays as it is.

        The score belonged to the shorter output and is not carried over.
        """
        if self.finished:
            raise InvalidInputError(
                f"output {self.index} has ended ({self.finish_reason}): nothing can be appended to it"
            )
        if self.logprobs is not None:
            raise InvalidInputError(
                f"output {self.index} reports logprobs, one row per token: one logprob alone makes no row to append"
            )
        if self.mixture is not None:
            raise InvalidInputError(f"output {self.index} was drawn from two models: one logprob does not say how")
        if self.kept is not None:
            raise InvalidInputError(f"output {self.index} tells what each token was drawn from: one logprob does not")
        return replace(
            self,
            text=self.text + text,
            token_ids=(*self.token_ids, token_id),
            cumulative_logprob=self.cumulative_logprob + logprob,
            score=None,
        )

    def compute_score(self) -> float:
        """What it ranks by: the score it was given, else its cumulative logprob; an empty output ranks last."""
        if self.score is not None:
            return self.score
        return float("-inf") if self.is_empty() else self.cumulative_logprob

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return cards.html_of_completion(self)


@dataclass(frozen=True, slots=True)
class ContinuationLogprobs:
    """What a model says of given tokens after a prompt: one entry per token. A rank of 1 is the likeliest token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    alternatives: tuple[LogprobRow, ...] | None = None  # with top_k: the likeliest tokens at each place, and the token
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def cumulative_logprob(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether the model, drawing greedily, writes these tokens."""
        return all(rank == 1 for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """What a teacher and a student say of the same tokens, and how far apart they are at each, over all tokens."""

    teacher: ContinuationLogprobs
    theta: ContinuationLogprobs
    forward_kl: tuple[float, ...]  # KL(teacher || student)
    reverse_kl: tuple[float, ...]  # KL(student || teacher)


class Standing(NamedTuple):
    """How a child ranks among its siblings."""

    child: int
    score: float
    finished: bool
    group: int = 0  # the number of its beam group


@dataclass(frozen=True, slots=True)
class GrownToken:
    """A token that a child took. `parent` is the child itself, or whom it was forked from if this is its first token.

    `text` is what the child's text grew by, nothing in the middle of a character. Where a stop string turns out to have
    begun earlier, `num_taken_back` characters are removed from the text before.
    """

    child: int
    parent: int
    position: int  # in the child's output
    token_id: int
    logprob: float
    text: str = ""
    num_taken_back: int = 0
    rows: Sequence[LogprobRow] | None = None  # one row; its dict is made when somebody reads it
    mixture: MixtureReport | None = None  # where two models were mixed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def alternatives(self) -> LogprobRow | None:
        """The likeliest tokens at this position and the token itself, if logprobs were asked for."""
        return None if self.rows is None else self.rows[0]


@dataclass(frozen=True, slots=True)
class GrowthStep:
    """What one step of the engine did to one request.

    Beams are ranked in every step, finished ones first, each best first; best-of is ranked in its last step. A parent
    is meant as it was before the step, so the tokens of a step may be read in any order.
    """

    tokens: tuple[GrownToken, ...] = ()
    standings: tuple[Standing, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds by the engine's clock; None for what has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All continuations of one prompt, as they are now."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: Sequence[LogprobRow | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    scored: ContinuationLogprobs | PairLogprobs | None = None  # of given tokens, where they alone were asked about
    growth: tuple[GrowthStep, ...] = ()  # since the last output, if output_kind is "growth"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return cards.html_of_requests([self])


class RequestOutputs(list[RequestOutput]):
    """A list of outputs that a notebook shows side by side."""

    def _repr_html_(self) -> str:
        return cards.html_of_requests(self)
