"""`response_format`: what an answer must look like, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from ramify.errors import InvalidInputError
from ramify.structured_outputs import ANY_OBJECT, KINDS, MOST_CHARACTERS, MOST_CHOICES, checked_structure

T = TypeVar("T")
_SCHEMA = "response_format.json_schema.schema"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class TextFormat(_Part):
    type: Literal["text"]


class ObjectFormat(_Part):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Part):
    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$", description="A name for your own records.")
    description: str | None = Field(None, max_length=4096, description="The same.")
    json_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="The JSON schema; by default any JSON."
    )
    strict: bool | None = Field(None, description="Answers always fit the schema, whatever this says.")


class SchemaFormat(_Part):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def structure_of(wanted: TextFormat | ObjectFormat | SchemaFormat | None) -> Mapping[str, Any] | None:
    """The `structured_outputs` that this asks for."""
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if isinstance(wanted, ObjectFormat):
        return ANY_OBJECT
    return {"json": wanted.json_schema.json_schema or {}}


def in_words_of_response_format(make: Callable[[], T]) -> T:
    """What `make` makes of such a structure; what is wrong with it is told by the name that the client used."""
    try:
        return make()
    except InvalidInputError as error:
        raise type(error)(str(error).replace("structured_outputs['json']", _SCHEMA)) from None


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    try:
        return checked_structure("structured_outputs", given)
    except InvalidInputError as error:
        # The field itself is named before it.
        raise ValueError(str(error).removeprefix("structured_outputs").removeprefix(" ")) from None


_TEXT = {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS}
_OF_KIND: dict[str, Any] = {
    "json": {"anyOf": [{"type": "object"}, _TEXT]},
    "regex": _TEXT,
    "choice": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_CHOICES},
    "grammar": _TEXT,
}
# The field of SamplingParams in JSON.
StructuredOutputs = Annotated[
    dict[str, Any],
    AfterValidator(_checked),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {kind: _OF_KIND[kind]},
                    "required": [kind],
                    "additionalProperties": False,
                }
                for kind in KINDS
            ]
        }
    ),
]
