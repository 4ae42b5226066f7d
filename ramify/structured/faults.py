"""What is wrong with a grammar, in words for the caller, and the place in a schema where it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from ramify.structured_outputs import Structure

MOST_TRIES = 200  # parts of a schema that are tried to find the one that is wrong
# Where schemas stand in a schema.
_IN_OBJECTS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

Way = list[str | int]
Tried = Callable[[Structure], str]  # a structure to what llguidance says against it; empty: nothing

TOO_LONG = "it takes too long to build"
TOO_LARGE = "it takes too much memory to build"

_TOO_MUCH = re.compile(f"{TOO_LONG}|{TOO_LARGE}|too (large|big|complex)")
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")
_SOURCE_LINE = re.compile(r"\s*\d+ \| ")


def fault_of(structure: Structure, said: str, tried: Tried) -> str:
    """What llguidance said of a structure, with the place in it."""
    if _TOO_MUCH.search(said):  # of no part of it alone, or of one that takes as long to look for
        return f"{_plain(said)}; make it smaller"
    if said.startswith("NoExtension"):
        return "the model's tokens can spell no text of it"
    if structure.kind == "json":
        where = "".join(f"[{key!r}]" if isinstance(key, str) else f"[{key}]" for key in _path(structure, said, tried))
        return (f"at {where}: " if where else "") + _plain(said)
    if structure.kind == "regex":
        return _of_regex(said)
    place = _PLACE.match(said)
    if place is None or structure.kind == "choice":
        return _plain(said)
    return f"line {place[1]}, column {place[2]}: {_plain(said)}"


def _plain(said: str) -> str:
    """Without llguidance's own source lines, in one line."""
    said = _PLACE.sub("", said).removeprefix("failed to compile JSON schema: ")
    lines = said.replace("<non-verbose/>", "").splitlines()
    kept = [line.strip() for line in lines if not _SOURCE_LINE.match(line) and line.strip(" ^")]
    return " ".join(kept)[:500]


def _of_regex(said: str) -> str:
    """Where the marks of the message begin, under the pattern that it repeats."""
    lines = said.splitlines()
    for pattern, marks in pairwise(lines):
        if "^" in marks and not marks.strip(" ^") and not _SOURCE_LINE.match(pattern):
            column = marks.index("^") - (len(pattern) - len(pattern.lstrip(" ")))
            error = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "it is wrong")
            return f"character {column}: {error}"
    return _plain(said)


def _path(structure: Structure, said: str, tried: Tried) -> Way:
    """To the smallest part of a schema of which llguidance says the same."""
    root = json.loads(structure.source)
    reason = _plain(said)
    path: Way = []
    left = MOST_TRIES

    def is_wrong(part: Any) -> bool:
        nonlocal left
        left -= 1
        # What the part refers to comes along.
        whole = {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **part}
        return left >= 0 and _plain(tried(Structure("json", json.dumps(whole)))) == reason

    part = root
    while isinstance(part, dict):
        found = next((step for step in _steps(part) if isinstance(step[1], dict) and is_wrong(step[1])), None)
        if found is None:
            break
        path += found[0]
        part = found[1]
    return path


def _steps(part: dict[str, Any]) -> Iterator[tuple[Way, Any]]:
    """The schemas that stand in a schema, each with the way to it."""
    for name in _IN_OBJECTS:
        inside = part.get(name)
        if isinstance(inside, dict):
            for key, value in inside.items():
                yield [name, key], value
    for name in _IN_LISTS:
        inside = part.get(name)
        if isinstance(inside, list):
            for index, value in enumerate(inside):
                yield [name, index], value
    for name in _ALONE:
        if isinstance(part.get(name), dict):
            yield [name], part[name]
