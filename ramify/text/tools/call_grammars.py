"""Answers as grammars, for tools that are strict while the model may answer as it likes: free text and sound calls.

Whatever the parser of a format would take for the beginning of a call (hermes.py, llama3.py) must go on as one, of a
function that there is and with arguments that fit its schema. All else is free. Tags may be tokens of their own, which
no text spells, or spelled by others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ramify.structured_outputs import JSON_SPACE, with_json_space
from ramify.text.tools import hermes, llama3
from ramify.text.tools.call_object import PARTS

Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by function
_COMMON = rf"""
TEXT: /(.|\n)*/
WS: /{JSON_SPACE}/
"""
# What counts as white space where lines begin: all that `str.isspace` does.
_SPACE = r"[\t\n\x0b\x0c\r\x1c-\x1f \u{85}\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}]*"


def hermes_answers(schemas: Schemas, special: Collection[str]) -> str:
    """special: the tags that are tokens of their own."""
    opening = _text(hermes.OPENING)
    openings = " | ".join(["spelled", *(f"TEXT {tag}" for tag in special if tag == hermes.OPENING)])
    closings = " | ".join([_text(hermes.CLOSING), *(tag for tag in special if tag == hermes.CLOSING)])
    return rf"""start: (opening WS? "{{" call WS? ({closings}))* TEXT
opening: {openings}
spelled[lazy]: TEXT {opening}
call: {_rest_of_call(schemas, "arguments")}{_COMMON}"""


def llama3_answers(schemas: Schemas, special: Collection[str]) -> str:
    """A brace that opens a line, the text, or what follows a call, may open one: a part of a call as its first key says
    that it does."""
    tags = " | ".join(["tagged", *(f"TEXT {tag}" for tag in special if tag == llama3.TAG)])
    by_tag = f'({tags}) WS? "{{" call after'
    spelled = re.escape(llama3.TAG)
    return rf"""start: TEXT | opens brace | {by_tag}
within: TEXT | opens_line brace | {by_tag}
after: TEXT | opens_next brace | {by_tag}
brace: call after | WS? OTHER within
opens[lazy]: /({_SPACE}|(.|\n)*\n{_SPACE})\{{/
opens_line[lazy]: /(.|\n)*\n{_SPACE}\{{/
opens_next[lazy]: /({_SPACE};?{_SPACE}|(.|\n)*\n{_SPACE})\{{/
tagged[lazy]: /(.|\n)*{spelled}/
OTHER: /[^"\x00-\x20]/ | (/"[^"\\\x00-\x1f]*"/ & ~/"({"|".join(PARTS)})"/)
call: {_rest_of_call(schemas, "parameters")}{_COMMON}"""


def _rest_of_call(schemas: Schemas, arguments: str) -> str:
    """Of one of these functions, behind the opening brace."""
    calls = []
    for name, schema in schemas.items():
        # "::=" would make it a grammar in another notation.
        spelled = json.dumps(with_json_space(schema)).replace("::=", r"\u003a\u003a=")
        calls.append(
            f'{_text(json.dumps(name))} WS? "," WS? {_text(json.dumps(arguments))} WS? ":" WS? %json {spelled}'
        )
    named = " | ".join(calls)
    return rf'WS? "\"name\"" WS? ":" WS? ({named}) WS? "}}"'


def _text(text: str) -> str:
    """Lark's strings have JSON's escapes."""
    return json.dumps(text)
