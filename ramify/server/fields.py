"""The fields that every request for samples has: OpenAI's own, and Ramify's under the names of SamplingParams.

Strict: nothing is coerced (`true` is not 1, `"3"` is not 3), NaN and infinities are refused, and so is every name that
is not here. A field that Ramify cannot serve is here only where clients send it at its neutral value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ramify import validation as check
from ramify.config import SEED_HIGH, SEED_LOW
from ramify.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    SamplingParams,
)

TokenId = Annotated[int, Field(ge=0, le=check.LARGEST_TOKEN_ID)]
Empty = Annotated[list[Any], Field(max_length=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _biases(given: dict[str, float]) -> dict[str, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise ValueError("must have token ids, written as whole numbers, for names")
    return given


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="End the stream with an event that counts tokens.")
    include_obfuscation: Literal[False] | None = Field(None, description="Not supported; `false` is accepted.")


class SamplingFields(Strict):
    """What the fields of SamplingParams are over HTTP; null is the same as leaving a field out."""

    model: str | None = Field(None, description="A name from `/v1/models`; by default the first.", max_length=256)
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES, description="Samples to return (default 1).")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy (default 1).")
    top_p: float | None = Field(
        None, gt=0, le=1, description="Smallest set of tokens whose mass reaches this (default 1)."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Once per token already in the output.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Per occurrence in the output.")
    seed: int | None = Field(None, ge=SEED_LOW, le=SEED_HIGH, description="Same seed, same prompt, same tokens.")
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]
        | None
    ) = Field(None, description="End where this text, or one of these, appears; it is not part of the output.")
    logit_bias: Annotated[dict[str, float], AfterValidator(_biases)] | None = Field(
        None, max_length=MAX_LOGIT_BIASES, description="Token id (as text) to an amount added to its logit."
    )

    top_k: int | None = Field(None, ge=-1, le=check.LARGEST_TOKEN_ID, description="Only the k likeliest (-1, 0: all).")
    min_p: float | None = Field(None, ge=0, le=1, description="Only tokens at least this share of the likeliest.")
    repetition_penalty: float | None = Field(
        None, gt=0, description="Above 1 discourages tokens of prompt and output (default 1)."
    )
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, description="End at one of these token ids."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop text or token in the text.")
    ignore_eos: bool | None = Field(None, description="Go on past the model's own end token.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="No end before this many tokens.")
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="Draw only from these."
    )
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="Never write these."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    strategy: Literal["parallel", "best_of_n", "beam_search", "diverse"] | None = Field(
        None, description="How the samples of one prompt relate (default: best_of_n if best_of > n, else parallel)."
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_SAMPLES, description="Samples to draw, of which the n best return, best first."
    )
    score: Literal["cumulative_logprob", "mean_logprob"] | None = Field(None, description="What ranks best_of.")
    beam_width: int | None = Field(None, ge=1, le=MAX_SAMPLES, description="Beams kept (default max(n, 2)).")
    length_penalty: float | None = Field(None, description="Beam scores are divided by length ** this (default 1).")
    early_stopping: bool | Literal["never"] | None = Field(None, description="When a beam search ends.")
    num_beam_groups: int | None = Field(None, ge=1, le=MAX_SAMPLES, description="Groups of beams pushed apart.")
    diversity_penalty: float | None = Field(
        None, ge=0, description="Taken from a token's logit per earlier sibling or group that took it."
    )

    def sampling_params(self, **own: Any) -> SamplingParams:
        """Everything that was given, and what the route itself has to say; there None is a value."""
        given = {name: value for name in _SHARED_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(name): bias for name, bias in self.logit_bias.items()}
        return SamplingParams(**{**given, **own})


class OpenAIFields(SamplingFields):
    """And what else every route of OpenAI's protocol has."""

    stream: bool | None = Field(None, description="Send tokens as server-sent events while they are drawn.")
    stream_options: StreamOptions | None = Field(None, description="Only together with `stream`.")
    user: str | None = Field(None, max_length=512, description="A label for your own records; it changes nothing.")
    return_token_ids: bool | None = Field(
        None, description="Add `token_ids` to choices, `prompt_token_ids` to replies."
    )

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must be left out, or stream must be true")
        if self.stream and self.strategy == "beam_search":
            raise ValueError("stream must be false in a beam search: beams change until it is over")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise ValueError("stream must be false where best_of is above n: the best are known at the end")
        return self


_SHARED_NAMES = tuple(name for name in SamplingFields.model_fields if name in SamplingParams.__dataclass_fields__)
