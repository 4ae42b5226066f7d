"""JSON files that strangers wrote: size, nesting and numbers are bounded before anything is built from them."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from ramify.errors import FileFormatError, ModelNotFoundError

LARGEST_JSON = 16 * 2**20
DEEPEST_JSON = 64  # real files have up to ten levels; a parser recurses, and so does whoever prints what it made

# Brackets inside strings nest nothing. A string without its closing quote reaches to the end, so that a match that has
# begun never fails and no character is looked at twice.
_STRINGS = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BETWEEN_BRACKETS = re.compile(r"[^\[\]{}]++")


def read_text(path: Path, largest: int = LARGEST_JSON) -> str:
    """The text of a file that must be there; ModelNotFoundError or FileFormatError says what is wrong with it."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for whoever writes to it
            raise FileFormatError(f"{path.name} is no file")
        if about.st_size > largest:
            raise FileFormatError(f"{path.name} is larger than {largest} bytes")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path.parent.name} has no {path.name}") from None
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path.name} is not UTF-8 text: {error}") from None
    except OSError as error:  # a file without permission, a disk that fails
        raise FileFormatError(f"{path.name} cannot be read: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else in it raises FileFormatError."""
    return parse_object(read_text(path), path.name)


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in a text; `name` says in messages where it stood."""
    if nesting(text, DEEPEST_JSON) > DEEPEST_JSON:
        raise FileFormatError(f"{name} is nested more than {DEEPEST_JSON} levels deep")
    try:
        value = json.loads(text)
        if "\\u" in text:  # the one way to write half a character, which is no text for anyone else
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # also Python's refusal of integers with more than 4,300 digits
        raise FileFormatError(f"{name} is not valid JSON: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{name} must hold a JSON object, got {type(value).__name__}")
    return value


def nesting(text: str, most: int) -> int:
    """How many brackets of a JSON text are open at once; counting stops above `most`. One pass over the text."""
    depth = deepest = 0
    for bracket in _BETWEEN_BRACKETS.sub("", _STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > deepest:
            deepest = depth
            if deepest > most:
                break
    return deepest


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
