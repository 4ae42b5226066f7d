"""Checks of a caller's values. Each raises InvalidInputError naming the field, the value and what is allowed.

No check coerces: `True` is not 1, `"3"` is not 3, NaN and infinities are nobody's number.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

from ramify.errors import InvalidInputError

LARGEST_TOKEN_ID = 2**31 - 1
_SHOWN_CHARACTERS = 120
E = TypeVar("E", bound=Enum)


def refuse(field: str, value: object, allowed: str) -> InvalidInputError:
    return InvalidInputError(f"{field} must be {allowed}, got {shown(value)}")


def _refuse_type(field: str, value: object, allowed: str) -> InvalidInputError:
    """As `refuse`; a number or a list of NumPy or torch looks as if it were allowed, so what to give is said."""
    hint = "; its .tolist() is of Python's own types" if hasattr(type(value), "tolist") else ""
    return InvalidInputError(f"{refuse(field, value, allowed)}{hint}")


def shown(value: object) -> str:
    """A stranger's value for a message: the beginning of its `repr`, of which no more is made than is shown."""
    writer = _Beginning()
    writer.maxlevel, writer.maxother = 3, _SHOWN_CHARACTERS
    writer.maxlist = writer.maxtuple = writer.maxset = writer.maxfrozenset = writer.maxdict = _SHOWN_CHARACTERS
    writer.maxstring = writer.maxlong = _SHOWN_CHARACTERS
    try:
        text = writer.repr(value)
    except Exception:  # Python itself refuses to print an integer of 4,300 digits; a caller's object may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


class _Beginning(reprlib.Repr):
    def repr_instance(self, x: object, level: int) -> str:  # noqa: ARG002 - the library's signature
        """An object in its own words; the library would cut them in the middle, and hide that it has none."""
        return repr(x)


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" in {low}..{high}"
    if low is not None:
        return f" >= {low}"
    return f" <= {high}" if high is not None else ""


def _at_most(high: float | None) -> str:
    return "" if high is None else f" and at most {high}"


def integer(field: str, value: object, low: int | None = None, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse_type(field, value, "an integer" + _span(low, high))
    if (low is not None and value < low) or (high is not None and value > high):
        raise refuse(field, value, "an integer" + _span(low, high))
    return value


def number(
    field: str, value: object, low: float | None = None, high: float | None = None, *, above: float | None = None
) -> float:
    """A finite number; integers are welcome, booleans are not. `above`: a low end that is itself refused."""
    allowed = "a finite number" + (_span(low, high) if above is None else f" above {above}{_at_most(high)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse_type(field, value, allowed)
    try:
        converted = float(value)
    except OverflowError:
        raise refuse(field, value, allowed) from None
    if not math.isfinite(converted):
        raise refuse(field, value, allowed)
    if (low is not None and converted < low) or (high is not None and converted > high):
        raise refuse(field, value, allowed)
    if above is not None and converted <= above:
        raise refuse(field, value, allowed)
    return converted


def boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(field, value, "True or False")
    return value


def text(field: str, value: object, longest: int | None = None) -> str:
    if not isinstance(value, str) or not value:
        raise refuse(field, value, "a non-empty string")
    if longest is not None and len(value) > longest:
        raise InvalidInputError(f"{field} must have at most {longest} characters, got {len(value)}")
    return value


def choice(field: str, value: object, allowed: Iterable[str]) -> str:
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise refuse(field, value, "one of " + ", ".join(map(repr, names)))
    return value


def member(field: str, value: object, kind: type[E]) -> E:
    """A member of an enumeration, or the string that names it."""
    try:
        return kind(value)
    except ValueError:
        raise refuse(field, value, "one of " + ", ".join(repr(item.value) for item in kind)) from None


def items(field: str, value: object, most: int) -> Sequence[Any]:
    """A list, tuple or set with at most `most` entries (a lone string is not a list of characters)."""
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple | set | frozenset):
        raise _refuse_type(field, value, "a list")
    if len(value) > most:
        raise InvalidInputError(f"{field} must have at most {most} entries, got {len(value)}")
    return tuple(value)


def token_ids(field: str, value: object, most: int, vocab_size: int | None = None) -> tuple[int, ...]:
    """Token ids: integers from 0, below the vocabulary's size once that is known."""
    ids = items(field, value, most)
    high = LARGEST_TOKEN_ID if vocab_size is None else vocab_size - 1
    if not all(type(token_id) is int and 0 <= token_id <= high for token_id in ids):  # plain ones: prompts are long
        for index, token_id in enumerate(ids):
            integer(f"{field}[{index}]", token_id, 0, high)
    return tuple(ids)
