"""Limits on what a chat template may cost: time, the size of one value, the size of all values together.

A template comes with a model, so a stranger wrote it. Jinja's sandbox keeps it from reaching Python, but not from
running for ever or filling the memory. So every operation that can make a large value out of small ones is checked
before it happens, and everything it makes is counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2.utils import Namespace

# No template needs integers of more bits, and arithmetic with them is slow.
_MAX_INTEGER_BITS = 4096
_MAX_COUNT = 2**16
_VALUES_IN_ALL = 64  # how many values of the largest size one rendering may make
_PARTS_BETWEEN_CLOCKS = 1024
_MOST_SEARCH_STEPS = 2**26  # a tenth of a second


class LimitError(RuntimeError):
    """A template exceeded a limit. Never leaves this package: callers see ChatTemplateError."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, *, max_characters: int, time_limit_seconds: float) -> None:
        self.max_characters = max_characters
        self.time_limit_seconds = time_limit_seconds
        # Most values are short-lived (text gathered bit by bit), so their sum may be much more than the output.
        self._left = _VALUES_IN_ALL * max_characters
        self._deadline = time.monotonic() + time_limit_seconds

    def tick(self, characters: int = 0) -> None:
        """Counts one operation that made this many characters, and checks the time."""
        self._left -= characters
        if self._left < 0:
            raise LimitError(f"the template made more than {_VALUES_IN_ALL * self.max_characters} characters in all")
        if time.monotonic() > self._deadline:
            raise LimitError(f"the template ran for longer than {self.time_limit_seconds} seconds")

    def require(self, characters: int) -> None:
        """Refuses a value larger than allowed, before it is made."""
        if characters > self.max_characters:
            raise LimitError(f"the template made a value of more than {self.max_characters} characters")

    def made(self, value: Any) -> Any:
        """Returns a value that an operation has just made, after counting it and checking its size."""
        self.require(self.size(value))
        self.tick(len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1)
        return value

    def size(self, value: Any) -> int:
        """About how long the text of a value is; shared parts count as often as they would be written.

        Stops at the limit, so that a value nested in itself does not take long.
        """
        total = 0
        num_parts = 0
        waiting = [value]
        while waiting:
            part = waiting.pop()
            num_parts += 1
            if num_parts % _PARTS_BETWEEN_CLOCKS == 0:
                self.tick()
            if isinstance(part, (str, bytes)):
                total += len(part)
            elif isinstance(part, int):
                if part.bit_length() > _MAX_INTEGER_BITS:
                    raise LimitError(f"the template made an integer of more than {_MAX_INTEGER_BITS} bits")
                total += 1 + part.bit_length() // 3
            elif isinstance(part, (list, tuple, set, frozenset)):
                total += 2 + 2 * len(part)
                waiting.extend(part)
            elif isinstance(part, Mapping):
                total += 2 + 4 * len(part)
                waiting.extend(part.keys())
                waiting.extend(part.values())
            elif isinstance(part, Namespace):
                total += 16
                waiting.append(object.__getattribute__(part, "_Namespace__attrs"))
            elif isinstance(part, (type({}.keys()), type({}.values()), type({}.items()))):
                total += 16
                waiting.extend(part)
            elif not isinstance(part, jinja2.Undefined):
                total += 32
            if total > self.max_characters:
                return total
        return total

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """The values as a list; refused as soon as it is larger than allowed."""
        result: list[Any] = []
        total = 0
        for value in values:
            self.tick()
            total += self.size(value) + 1
            self.require(total)
            result.append(value)
        return result

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Checks `left operator right` before it is computed."""
        self.tick()
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
                    self.require(self.size(value) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_INTEGER_BITS:
                raise LimitError(f"the template made an integer of more than {_MAX_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self.check_format(str(left), [right])

    def check_format(self, pattern: str, values: Any) -> None:
        """Checks `pattern % values` and `pattern.format(values)`: widths, and values written many times."""
        # A width taken from a value ("%*d", "{:{}}") could be any number, and no template needs it.
        if re.search(r"%[^a-zA-Z%]*\*", pattern) or re.search(r"\{[^{}]*\{", pattern.replace("{{", "")):
            raise LimitError("the template takes the width of a format from a value")
        widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", pattern))
        fields = pattern.count("%") + pattern.count("{")
        self.require(len(pattern) + widths + fields * self.size(values))

    def check_replace(self, text: str, old: str, new: str) -> None:
        """Checks `text.replace(old, new)`."""
        self.require(len(text) + (text.count(old) if old else len(text) + 1) * len(new))

    def check_search(self, text: Any, sought: Any) -> None:
        """Checks a search that may compare every place of `text` with every character of `sought`."""
        if isinstance(sought, (str, bytes)) and len(text) * len(sought) > _MOST_SEARCH_STEPS:
            raise LimitError("the template searches a long text for a long one")

    def check_count(self, count: Any, each: Any = None) -> None:
        """Checks the making of `count` parts with `each` in every one."""
        if isinstance(count, int):
            if count > _MAX_COUNT:
                raise LimitError(f"the template asked for {count} parts, more than {_MAX_COUNT}")
            self.require(max(count, 0) * self.size(each))
