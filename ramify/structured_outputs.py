"""What an output must look like: the values that `structured_outputs` takes, checked as far as text alone allows.

    {"json": schema}       JSON that fits a JSON schema, given as a dict or as its text
    {"regex": pattern}     text that a regular expression matches from its beginning to its end
    {"choice": texts}      one of these texts
    {"grammar": lark}      text of a grammar in Lark's notation (llguidance's dialect) or GBNF

Whether a schema, pattern or grammar can be followed is told where it meets a tokenizer: structured/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from ramify import validation as check
from ramify.errors import InvalidInputError
from ramify.files.json_file import nesting

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_CHARACTERS = 2**18  # of a schema, a pattern, a grammar, or all choices together
MOST_CHOICES = 4_096
DEEPEST_SCHEMA = 64
ANY_OBJECT: Mapping[str, Any] = {"json": {"type": "object"}}
# Between the tokens of JSON. A bound, for there are models that would go on with spaces for ever.
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


class Structure(NamedTuple):
    """The one thing that is asked for. `source` is the text of a schema, pattern or grammar; of choices, their list as
    JSON: two that are equal ask for the same."""

    kind: Kind
    source: str

    @classmethod
    def of(cls, checked: Mapping[str, Any]) -> Structure:
        """Of what `checked_structure` returned."""
        [kind] = [kind for kind in KINDS if kind in checked]
        return cls(kind, json.dumps(checked[kind]) if kind == "choice" else checked[kind])


def checked_structure(name: str, value: object) -> dict[str, Any]:
    """The same, with a schema as its text and choices as a tuple, so that nobody can change them later."""
    if not isinstance(value, Mapping) or len(value) != 1 or not set(value) <= set(KINDS):
        raise check.refuse(name, value, f"a dict with one of the keys {', '.join(map(repr, KINDS))}")
    [(kind, given)] = value.items()
    name = f"{name}[{kind!r}]"
    if kind == "json":
        return {kind: _schema_text(name, given)}
    if kind == "choice":
        return {kind: _choices(name, given)}
    return {kind: _sound(name, check.text(name, given, MOST_CHARACTERS))}


def _schema_text(name: str, given: object) -> str:
    if isinstance(given, str):
        if len(given) > MOST_CHARACTERS:
            raise InvalidInputError(f"{name} must have at most {MOST_CHARACTERS} characters, got {len(given)}")
        if nesting(given, DEEPEST_SCHEMA) > DEEPEST_SCHEMA:
            raise InvalidInputError(f"{name} must be nested at most {DEEPEST_SCHEMA} levels deep")
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{name} must be a JSON schema, and is no JSON: {error}") from None
    if not isinstance(given, Mapping | bool):
        raise check.refuse(name, given, "a JSON schema: a dict, or its text")
    try:
        text = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name} must be a JSON schema, and cannot be written as JSON: {error}") from None
    if len(text) > MOST_CHARACTERS:
        raise InvalidInputError(f"{name} must have at most {MOST_CHARACTERS} characters as JSON, got {len(text)}")
    if nesting(text, DEEPEST_SCHEMA) > DEEPEST_SCHEMA:
        raise InvalidInputError(f"{name} must be nested at most {DEEPEST_SCHEMA} levels deep")
    return text


def _choices(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, set | frozenset):
        raise check.refuse(name, given, "a list of texts")
    texts = check.items(name, given, MOST_CHOICES)
    if not texts:
        raise InvalidInputError(f"{name} must have at least one entry, got none")
    for index, text in enumerate(texts):
        _sound(f"{name}[{index}]", check.text(f"{name}[{index}]", text))
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise InvalidInputError(f"{name} must have at most {MOST_CHARACTERS} characters together")
    return tuple(dict.fromkeys(texts))


def _sound(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name} has a lone surrogate at position {error.start}: it is no valid Unicode"
        raise InvalidInputError(message) from None
    return text


def with_json_space(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same for llguidance, with a bound on white space unless the schema has rules of its own for that."""
    own = schema.get("x-guidance")
    if own is None or (isinstance(own, Mapping) and not own.keys() & {"whitespace_pattern", "whitespace_flexible"}):
        return {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE, **(own or {})}}
    return dict(schema)
