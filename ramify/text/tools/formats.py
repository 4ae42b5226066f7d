"""The formats in which models write calls, by name, and which of them a chat template teaches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ramify.text.tools import hermes, llama3
from ramify.text.tools.call_grammars import Schemas, hermes_answers, llama3_answers
from ramify.text.tools.events import ToolParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` stands before a call; `arguments` is what these are called; `tags` must not be skipped in texts.

    `answers` is a grammar of answers in which every call fits a schema; it wants to know which tags are special tokens.
    """

    name: str
    make: Callable[[Collection[str], int | None], ToolParser]  # of known names and the most calls
    opening: str
    arguments: str
    answers: Callable[[Schemas, Collection[str]], str]
    tags: tuple[str, ...] = ()


FORMATS = {
    made.name: made
    for made in (
        ToolFormat(
            "hermes",
            lambda _names, most_calls: hermes.HermesParser(most_calls=most_calls),
            opening=f"{hermes.OPENING}\n",
            arguments="arguments",
            answers=hermes_answers,
            tags=(hermes.OPENING, hermes.CLOSING),
        ),
        ToolFormat(
            "llama3_json",
            lambda names, most_calls: llama3.Llama3Parser(names, most_calls=most_calls),
            opening="",
            arguments="parameters",
            answers=llama3_answers,
        ),
    )
}
# Formats that have Hermes' tags around something else than JSON.
_OTHERS = ("<function=", "<arg_key>", "<parameter=")


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None: not one of these."""
    if hermes.OPENING in template:
        return None if any(mark in template for mark in _OTHERS) else FORMATS["hermes"]
    speaks_llama = '"parameters"' in template and ("ipython" in template or llama3.TAG in template)
    return FORMATS["llama3_json"] if speaks_llama else None
