"""The vocabulary in GGUF metadata, read and checked."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ramify.errors import FileFormatError
from ramify.validation import shown


class TokenType(enum.IntEnum):
    """What a token is for, as GGUF numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, with their types and scores: lists of equal length, no token twice."""

    tokens: list[str]
    id_of_token: dict[str, int]
    types: list[int]
    scores: list[float] | None


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary; FileFormatError if it contradicts itself."""
    tokens = _array(metadata, "tokens")
    if not tokens:
        raise FileFormatError("tokenizer.ggml.tokens is missing or empty")
    if set(map(type, tokens)) != {str}:
        raise FileFormatError("tokenizer.ggml.tokens must be an array of texts")
    id_of_token = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(id_of_token) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if id_of_token[token] != token_id)
        raise FileFormatError(f"tokenizer.ggml.tokens has {shown(twice)} more than once")
    types = _array(metadata, "token_type")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    _check_length(types, tokens, "token_type")
    known = set(TokenType)
    if not set(map(type, types)) <= {int} or not set(types) <= known:
        raise FileFormatError("tokenizer.ggml.token_type must hold the numbers 1 to 6")
    scores = _array(metadata, "scores")
    if scores is not None:
        _check_length(scores, tokens, "scores")
        if not set(map(type, scores)) <= {int, float} or any(map(math.isnan, scores)):
            raise FileFormatError("tokenizer.ggml.scores must hold numbers")
    return Vocabulary(tokens, id_of_token, types, scores)


def optional_id(metadata: Mapping[str, Any], name: str, vocabulary: Vocabulary) -> int | None:
    """A token id from the metadata; None if the file does not have it."""
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        return None
    value = metadata[key]
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise FileFormatError(f"{key} must be an integer, not {shown(value)}")
    token_id = int(value)
    if not 0 <= token_id < len(vocabulary.tokens):
        raise FileFormatError(f"{key} is {token_id}, outside the vocabulary of {len(vocabulary.tokens)} tokens")
    return token_id


def optional_bool(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A flag from the metadata; `default` if the file does not have it."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    # numpy's booleans are not instances of `bool`, but have a type of that name.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise FileFormatError(f"{key} must be true or false, not {shown(value)}")
    return bool(value)


def _array(metadata: Mapping[str, Any], name: str) -> list[Any] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        raise FileFormatError(f"tokenizer.ggml.{name} must be an array, not {type(value).__name__}")
    return value


def _check_length(values: list[Any], tokens: list[str], name: str) -> None:
    if len(values) != len(tokens):
        raise FileFormatError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")
