"""What a schema says of the lengths of strings: how short they may have to be, and which strings it names."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Under these, a string's characters are not alike: which ones may come depends on those before them.
_TELL_CHARACTERS_APART = ("pattern", "patternProperties", "format", "x-guidance")
_OF_NAMES = ("properties", "$defs", "definitions", "dependentSchemas", "dependentRequired")  # what they hold has names
MOST_NAMED = 64  # strings that begin alike


@dataclass(frozen=True, slots=True)
class StringLimits:
    least: int  # characters, of the shortest limit
    named: Sequence[bytes]  # strings that stand in the schema, sorted; a text may have them however long they are

    def spelled(self) -> list[Any]:
        """For JSON."""
        return [self.least, [name.hex() for name in self.named]]

    @classmethod
    def read(cls, spelled: list[Any]) -> StringLimits:
        least, named = spelled
        return cls(least, [bytes.fromhex(name) for name in named])

    def named_after(self, content: bytes) -> list[bytes] | None:
        """What strings that begin with this content still lack; None: they are too many."""
        first = bisect_left(self.named, content)
        found: list[bytes] = []
        for index in range(first, len(self.named)):
            if not self.named[index].startswith(content):
                break
            if len(found) == MOST_NAMED:
                return None
            found.append(self.named[index][len(content) :])
        return found


def limits_of(source: str, neutral: str) -> StringLimits | None:
    """None: no string has a limit; or it is not clear that all characters of free strings are alike.

    neutral: a character that no named string may have.
    """
    limits: list[int] = []
    named: set[str] = set()
    if not _read(json.loads(source), limits, named) or not limits:
        return None
    if any(neutral in text or json.dumps(text, ensure_ascii=False) != f'"{text}"' or "\x7f" in text for text in named):
        return None
    return StringLimits(min(limits), sorted(text.encode(errors="replace") for text in named))


def _read(part: Any, limits: list[int], named: set[str]) -> bool:
    """Notes limits and names of a part of a schema; returns whether it tells no characters apart.

    Where it is not sure if something is a schema or a value, it counts as both.
    """
    if isinstance(part, str):
        named.add(part)
    if isinstance(part, dict):
        if any(key in part for key in _TELL_CHARACTERS_APART):
            return False
        if isinstance(part.get("maxLength"), int):
            limits.append(part["maxLength"])
        named.update(part)
        inside = [
            each
            for key, value in part.items()
            for each in (value.values() if key in _OF_NAMES and isinstance(value, dict) else [value])
        ]
        named.update(*(value for key, value in part.items() if key in _OF_NAMES and isinstance(value, dict)))
    else:
        inside = part if isinstance(part, list) else []
    is_alike = [_read(each, limits, named) for each in inside]
    return all(is_alike)
