"""The fields that every request for samples has: OpenAI's own, and Ramify's under the names of SamplingParams.

Strict: nothing is coerced (`true` is not 1, `"3"` is not 3), NaN and infinities are refused, and so is every name that
is not here or in `neutral.py`, where those stand that Ramify cannot serve but clients send without asking for anything.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
    model_validator,
)

from ramify import validation as check
from ramify.models.generation_defaults import RECOMMENDED_FIELDS, GenerationDefaults
from ramify.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    PYTHON_ALONE,
    Limits,
    SamplingParams,
)
from ramify.server.response_format import (
    ResponseFormat,
    StructuredOutputs,
    in_words_of_response_format,
    structure_of,
)

TokenId = Annotated[int, Field(ge=0, le=check.LARGEST_TOKEN_ID)]
# The first id that is wrong ends the check: a body may hold millions, and an error for each would fill the memory.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Label = Annotated[str, Field(max_length=512)]
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _biases(given: dict[str, float]) -> dict[str, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise ValueError("must have token ids, written as whole numbers, for names")
    return given


def _or_never(given: object) -> object:
    if type(given) is bool or given == "never":
        return given
    raise ValueError("must be true, false or 'never'")


_OrNever = Annotated[
    bool | Literal["never"], PlainValidator(_or_never), WithJsonSchema({"enum": [True, False, "never"]})
]


def _listed(given: object) -> object:
    return [given] if isinstance(given, str) else given


# Where HTTP differs from SamplingParams. First, fields that are something else in JSON than in Python:
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
DIFFERENT: dict[str, Any] = {
    "temperature": Annotated[float, Field(ge=0, le=2)],  # OpenAI's range
    # Not a union, of which the first kind would be told of whatever is wrong with the second.
    "stop": Annotated[
        list[_Stop],
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_listed),
        WithJsonSchema({"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS}]}),
    ],
    "logit_bias": Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES), AfterValidator(_biases)],
    "structured_outputs": StructuredOutputs,
}
# Then fields that each route defines itself.
BY_ROUTE = frozenset({"max_tokens", "logprobs", "prompt_logprobs"})
SHARED = tuple(option for option in dataclasses.fields(SamplingParams) if option.name not in BY_ROUTE | PYTHON_ALONE)


def _json_type(option: dataclasses.Field[Any]) -> Any:
    """What a field takes in JSON: the same values, within the same limits."""
    limits: Limits = option.metadata["limits"]
    if option.name in DIFFERENT:
        return DIFFERENT[option.name]
    if limits.choices:
        return Literal.__getitem__(limits.choices)  # by name only, though in Python a score may be a function
    match str(option.type).removesuffix(" | None"):
        case "bool":
            return bool
        case "bool | Literal['never']":
            return _OrNever
        case "int":
            return Annotated[int, Field(ge=limits.low, le=limits.high)]
        case "float":
            return Annotated[float, Field(ge=limits.low, gt=limits.above, le=limits.high)]
        case "Sequence[int]":
            return Annotated[list[TokenId], Field(min_length=limits.fewest, max_length=limits.most)]
        case "Sequence[str]":
            text = Annotated[str, Field(min_length=1, max_length=limits.longest)]
            return Annotated[list[text], Field(max_length=limits.most)]
    raise TypeError(f"SamplingParams.{option.name}: what is a {option.type} in JSON?")


def _description(option: dataclasses.Field[Any]) -> str:
    """The help text of the field's flag as a sentence, with the default (which the command line shows by itself)."""
    said = option.metadata["help"]
    default = "" if option.default is None else f"; by default {json.dumps(option.default)}"
    if option.name in RECOMMENDED_FIELDS:
        default += " unless the model recommends another value"
    return f"{said[0].upper()}{said[1:]}{default}."


def _with_shared_fields(model: type[M]) -> type[M]:
    """Adds the fields of SamplingParams to a class of requests; null is the same as leaving one out."""
    shared: dict[str, Any] = {
        option.name: (_json_type(option) | None, Field(None, description=_description(option))) for option in SHARED
    }
    return create_model(model.__name__, __base__=model, __module__=model.__module__, **shared)


@_with_shared_fields
class SamplingFields(Strict):
    """What every request for samples may say."""

    model: str | None = Field(None, description="A name from `/v1/models`; by default the first.", max_length=256)

    def given(self) -> dict[str, Any]:
        """The fields of SamplingParams that the client set, as they came."""
        return {option.name: value for option in SHARED if (value := getattr(self, option.name)) is not None}

    def sampling_params(self, defaults: GenerationDefaults, **own: Any) -> SamplingParams:
        """What the client set, and what the route itself says; to a route None is a value. The model says the rest."""
        given = self.given()
        if "logit_bias" in given:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
        return defaults.params({**given, **own})


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="End the stream with an event that counts tokens.")
    include_obfuscation: Literal[False] | None = Field(None, description="Not supported; `false` is accepted.")
    continuous_usage_stats: Literal[False] | None = Field(None, description="Not supported; `false` is accepted.")


class OpenAIFields(SamplingFields):
    """And what else every route of OpenAI's protocol has."""

    stream: bool | None = Field(None, description="Send tokens as server-sent events while they are drawn.")
    stream_options: StreamOptions | None = Field(None, description="Only together with `stream`.")
    user: Label | None = Field(None, description="A label for your own records; it changes nothing.")
    safety_identifier: Label | None = Field(None, description="Another such label.")
    prompt_cache_key: Label | None = Field(None, description="Another: prefixes are found by their tokens alone.")
    metadata: Annotated[dict[str, Label], Field(max_length=16)] | None = Field(None, description="More such labels.")
    store: bool | None = Field(None, description="Nothing is stored, and no route would return it.")
    response_format: ResponseFormat | None = Field(
        None, description="What answers look like: text, any JSON object, or JSON that fits a schema."
    )
    return_token_ids: bool | None = Field(
        None, description="Add `token_ids` to choices, `prompt_token_ids` to replies."
    )

    @property
    def is_formatted(self) -> bool:
        """Whether `response_format` says what answers look like."""
        return structure_of(self.response_format) is not None

    def given(self) -> dict[str, Any]:
        given = super().given()
        structure = structure_of(self.response_format)
        if structure is not None:
            given["structured_outputs"] = structure
        return given

    def sampling_params(self, defaults: GenerationDefaults, **own: Any) -> SamplingParams:
        make = partial(super().sampling_params, defaults, **own)
        return in_words_of_response_format(make) if self.is_formatted else make()

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        if self.is_formatted and super().given().get("structured_outputs") is not None:
            raise ValueError("structured_outputs must be left out where response_format says what answers look like")
        return self

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must be left out, or stream must be true")
        given = self.given()
        if self.stream and given.get("strategy") == "beam_search":
            raise ValueError("stream must be false in a beam search: beams change until it is over")
        if self.stream and given.get("best_of", 1) > given.get("n", 1):
            raise ValueError("stream must be false where best_of is above n: the best are known at the end")
        return self
