"""Finding answers in texts and comparing them."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from ramify.distill.recipe import Match, Recipe

_NUMBER = re.compile(r"[-−]?\s?\$?\s?\d[\d,]*(?:\.\d+)?")


def holds_final_answer(answer: str, recipe: Recipe) -> bool:
    """Whether a final answer can be found in it as the recipe says, and not only the whole taken for it."""
    return _found(answer, recipe.reference_pattern, recipe.match) is not None


def reference_answer(answer: str, recipe: Recipe) -> str:
    """A problem's final answer: what `reference_pattern` matches, else its last number or all of it, by `match`."""
    return _found(answer, recipe.reference_pattern, recipe.match) or answer.strip()


def sample_answer(text: str, recipe: Recipe) -> str | None:
    """A sample's answer; None if it has none."""
    return _found(text, recipe.answer_pattern, recipe.match)


def is_match(found: str, wanted: str, match: Match) -> bool:
    if match == "number":
        numbers = as_number(found), as_number(wanted)
        return None not in numbers and numbers[0] == numbers[1]
    return " ".join(found.split()) == " ".join(wanted.split())


def as_number(text: str) -> Decimal | None:
    """The last number of a text: `$1,200.50` is 1200.50, `-3` and `−3` are the same."""
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    plain = matches[-1].replace("−", "-").translate(str.maketrans("", "", "$, "))
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None


def _found(text: str, pattern: str | None, match: Match) -> str | None:
    if pattern is not None:
        matches = list(re.finditer(pattern, text))
        if not matches:
            return None
        last = matches[-1]
        return (last[1] if last.re.groups and last[1] is not None else last[0]).strip()
    if match == "number":
        numbers = _NUMBER.findall(text)
        return numbers[-1].strip() if numbers else None
    return text.strip() or None
