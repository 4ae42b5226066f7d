"""Prompt templates: text with {question}, {answer} and {final_answer}; {{ and }} are braces. No code is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ramify import validation as check
from ramify.errors import InvalidInputError

NAMES = ("question", "answer", "final_answer")
ANSWERS = frozenset({"answer", "final_answer"})
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Template:
    def __init__(self, field: str, text: object) -> None:
        self.text = check.text(field, text)
        self.names = set[str]()
        for match in _PIECE.finditer(self.text):
            if match[0] in ("{{", "}}"):
                continue
            if match[1] not in NAMES:
                allowed = ", ".join(f"{{{name}}}" for name in NAMES)
                raise InvalidInputError(
                    f"{field} may hold {allowed}, and braces as {{{{ and }}}}; got {match[0]!r} at {match.start()}"
                )
            self.names.add(match[1])

    def fill(self, values: Mapping[str, str]) -> str:
        """Braces in the values stay as they are."""
        return _PIECE.sub(lambda match: match[0][0] if match[0] in ("{{", "}}") else values[match[1]], self.text)
