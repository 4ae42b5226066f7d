"""Which Jinja filters chat templates may use, and what is checked before each runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ramify.text.template_limits import Budget

# Filters that turn their value into text, so its whole size counts.
_WRITING = frozenset(
    {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace"}
    | {"safe", "string", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount", "wordwrap"}
)
# Filters that return a value which was there before.
_PASSING = frozenset({"attr", "count", "d", "default", "first", "last", "length", "max", "min", "random"})
# Filters for web pages whose running time can grow with the square of the text, and a debugging aid.
REMOVED_FILTERS = ("pprint", "striptags", "urlize", "xmlattr")
_WRAPPED_CHARACTERS = 2**14
_MAX_PRECISION = 300


def fresh_value(name: str) -> bool:
    """Whether the filter makes a new value, which must be counted."""
    return name not in _PASSING


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as in `transformers`: Jinja's own would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def check_filter(budget: Budget, name: str, value: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Checks one use of a filter; returns the value to give it: a list, if it was an iterator."""
    budget.tick()
    for number in (*arguments, *named.values()):
        if isinstance(number, int):
            budget.require(abs(number))

    def argument(index: int, keyword: str, default: Any = None) -> Any:
        return arguments[index] if len(arguments) > index else named.get(keyword, default)

    if name in ("join", "list", "sort", "sum") and not isinstance(value, (str, Mapping, jinja2.Undefined)):
        value = budget.listed(value)
    size = budget.size(value) if name in _WRITING else 0
    budget.require(size)
    if name == "join":
        count = len(value) if isinstance(value, (list, str, Mapping)) else 0
        budget.require(size + count * budget.size(argument(0, "d", "")))
    elif name == "replace":
        budget.check_replace(str(value), str(argument(0, "old", "")), str(argument(1, "new", "")))
    elif name == "trim":
        budget.check_search(str(value), argument(0, "chars"))
    elif name == "format":
        budget.check_format(str(value), [*arguments, dict(named)])
    elif name == "indent":
        width = argument(0, "width", 4)
        lines = len(str(value).splitlines()) + 1
        budget.require(size + lines * (width if isinstance(width, int) else budget.size(width)))
    elif name == "tojson":
        _check_json(budget, value, size, argument(1, "indent"), argument(2, "separators"))
    elif name == "wordwrap":
        # textwrap takes quadratic time for an overlong word.
        if size > _WRAPPED_CHARACTERS:
            raise SecurityError(f"wordwrap takes texts of at most {_WRAPPED_CHARACTERS} characters")
        budget.require(size * (1 + budget.size(argument(2, "wrapstring", "\n"))))
    elif name == "round":
        # Jinja computes ten to this power.
        if isinstance(precision := argument(0, "precision", 0), int) and abs(precision) > _MAX_PRECISION:
            raise SecurityError(f"round takes a precision of at most {_MAX_PRECISION}")
    elif name in ("batch", "slice"):
        budget.check_count(argument(0, "linecount" if name == "batch" else "slices"), argument(1, "fill_with"))
    elif name == "sum" and not isinstance(argument(1, "start", 0), (int, float)):
        raise SecurityError("sum adds numbers only")
    return value


def _check_json(budget: Budget, value: Any, size: int, indent: Any, separators: Any) -> None:
    """Counts, besides the value, an indented line and separators for each of its parts."""
    parts, depth = _shape(value)
    width = max(indent, 0) if isinstance(indent, int) else budget.size(indent or "")
    budget.require(size + parts * (width * depth + budget.size(separators or "")))


def _shape(value: Any) -> tuple[int, int]:
    """How many parts the value has in all, and how deeply they are nested."""
    parts = depth = 0
    level = [value]
    while level:
        parts += len(level)
        depth += 1
        inner: list[Any] = []
        for part in level:
            if isinstance(part, Mapping):
                inner.extend(part.values())
            elif isinstance(part, (list, tuple)):
                inner.extend(part)
        level = inner
    return parts, depth
