"""MetadataReader: typed look-ups in a checkpoint's metadata, whose errors name the field that is missing or wrong.

Every number has a range, so that arithmetic on what it returns neither overflows nor meets an infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.validation import shown

LARGEST_INTEGER = 2**31 - 1
LARGEST_NUMBER = 1e30  # and its square fits in a double


class MetadataReader:
    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_INTEGER:
            raise self.refusal(name, f"a whole number up to {LARGEST_INTEGER}", value)
        return value

    def number(
        self, name: str, default: float | None = None, *, low: float = 0.0, high: float = LARGEST_NUMBER
    ) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            value = default
        # NaN is in no range, and comparing needs no conversion that an integer of a thousand digits would not survive.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refusal(name, f"a number in {low:g}..{high:g}", value)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refusal(name, "a text", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object with names; empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object", value)
        return value

    def one_of(self, name: str, known: tuple[str, ...], what: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or value not in known:
            raise UnsupportedModelError(f"{what} {shown(value)} is not supported; known: {', '.join(known)}")
        return value

    def refusal(self, name: str, allowed: str, value: object) -> FileFormatError:
        return FileFormatError(f"{self.where}: {name} must be {allowed}, got {shown(value)}")
