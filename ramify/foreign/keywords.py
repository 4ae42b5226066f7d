"""Keywords that a callable does not have: dropped where they ask for nothing, else refused, all in one error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ramify.errors import InvalidInputError, UnsupportedError
from ramify.validation import shown

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A keyword of another library. None and what is empty ask for nothing; `neutral` are further values that do so.

    `instead` says what serves the purpose of all other values. A keyword that `changes_nothing` takes any value:
    no result depends on it.
    """

    instead: str = ""
    neutral: tuple[object, ...] = ()
    changes_nothing: bool = False

    def asks_for_nothing(self, value: object) -> bool:
        if self.changes_nothing or value is None:
            return True
        if isinstance(value, str | list | tuple | dict | set) and not value:
            return True
        return any(type(value) is type(each) and value == each for each in self.neutral)

    @property
    def allowed(self) -> str:
        return " or ".join(map(repr, self.neutral or (None,)))


def own_keywords(
    given: Mapping[str, Any],
    known: Collection[str],
    foreign: Mapping[str, Foreign],
    *,
    what: str,
    wrong: Sequence[str] = (),
) -> dict[str, Any]:
    """The keywords that are known; every other one either asks for nothing or is refused, all in one error.

    `wrong` is what that error says of known ones.
    """
    own = {name: value for name, value in given.items() if name in known}
    refused, unknown = [], []
    for name, value in given.items():
        if name in known:
            continue
        if name not in foreign:
            unknown.append(_unknown(name, known, what))
        elif not foreign[name].asks_for_nothing(value):
            refused.append(f"{name} must be {foreign[name].allowed}, got {shown(value)}: {foreign[name].instead}")
    lines = [*wrong, *refused, *unknown]
    if not lines:
        return own
    message = lines[0] if len(lines) == 1 else f"{len(lines)} cannot be taken:\n- " + "\n- ".join(lines)
    if unknown:
        raise InvalidInputError(f"{message}; there are: {', '.join(sorted(known))}")
    raise (InvalidInputError if wrong else UnsupportedError)(message)


def _unknown(name: str, known: Collection[str], what: str) -> str:
    close = get_close_matches(name, known, n=1)
    return f"{name!r} is not {what}" + (f" (did you mean {close[0]}?)" if close else "")


def strict_keywords(foreign: Mapping[str, Foreign], what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a callable take foreign keywords that ask for nothing; others are refused by an error of ours.

    Type checkers see the callable as it was, and so still know a misspelt keyword.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs.keys() <= set(known):
                return function(*args, **kwargs)
            return function(*args, **own_keywords(kwargs, known, foreign, what=what))

        return call

    return decorate
