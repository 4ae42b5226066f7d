"""The events of `/ramify/stream`, as the OpenAPI document describes them; `growth.py` makes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from ramify.server.replies import Reply, Usage


class StartEvent(Reply):
    """The first event: the request was taken."""

    type: Literal["start"]
    id: str
    model: str
    strategy: Literal["parallel", "best_of_n", "beam_search", "diverse", "arithmetic", "without_replacement"]
    num_children: int = Field(description="Continuations that are drawn, or beams that run.")
    num_prompt_tokens: int


class Alternative(Reply):
    token_id: int
    token: str | None = Field(description="Its own text; null where the model has no tokenizer.")
    logprob: float | None


class TokenMixture(Reply):
    """Two models at one token, both at the request's temperature."""

    alpha: float = Field(description="The teacher's weight.")
    kl_teacher: float | None = Field(description="KL divergence of the mixture from the teacher, in nats.")
    kl_theta: float | None = Field(description="And from the student.")
    logprob_teacher: float | None = Field(description="What the teacher gives this token.")
    logprob_theta: float | None


class GrownToken(Reply):
    """A token that a child took, after those of its parent."""

    child: int = Field(description="The continuation that took it.")
    parent: int = Field(description="Whose tokens stand before it: the child itself, or the one it forked from.")
    position: int = Field(description="Its place in the child's output, from 0.")
    token_id: int
    token: str | None = Field(description="Its own text, special tokens written out.")
    text: str = Field(description="What the child's text grew by: nothing in the middle of a character.")
    num_taken_back: int = Field(description="Characters of earlier text that a stop text turned out to begin with.")
    logprob: float | None = Field(description="By the model's own distribution; null where it is minus infinity.")
    rank: int | None = Field(description="1 is the likeliest; null without top_logprobs.")
    top: list[Alternative] = Field(description="The likeliest tokens at this place, and this one; with top_logprobs.")
    mixture: TokenMixture | None = Field(description="How two models were mixed here; null where there is one.")
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class Standing(Reply):
    child: int
    score: float | None = Field(description="What it is ranked by; null is last.")
    finished: bool
    group: int = Field(description="Its group of beams, from 0.")


class GrowthStep(Reply):
    """One step of the engine. Parents are named as they stood before it."""

    tokens: list[GrownToken]
    standings: list[Standing] = Field(
        description="Beams: all that are kept, finished ones first, best first. Best-of: all, in the last step."
    )


class StepsEvent(Reply):
    """What happened since the last event; several steps for a reader who is slow."""

    type: Literal["steps"]
    steps: list[GrowthStep]


class GrownOutput(Reply):
    index: int = Field(description="The child's number, or its rank where outputs are ranked.")
    child: int
    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    cumulative_logprob: float | None
    score: float | None
    num_tokens: int


class EndEvent(Reply):
    """The last event: the outputs that count."""

    type: Literal["end"]
    outputs: list[GrownOutput]
    usage: Usage


class GrowthEvent(RootModel[Annotated[StartEvent | StepsEvent | EndEvent, Field(discriminator="type")]]):
    """One `data:` line of the stream."""
