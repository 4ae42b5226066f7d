"""What is asked for as a grammar in Lark's notation, which llguidance reads."""

from __future__ import annotations

import json

from ramify.structured_outputs import Structure

# Every spelling of the grammar's text may be drawn: a token is masked only if no text of the grammar goes on with it.
# Last, so that a caller's lines keep their numbers.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Between the tokens of JSON. A bound, for there are models that would go on with spaces for ever.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def lark_of(structure: Structure) -> str:
    match structure.kind:
        case "json":
            return f"start: %json {_with_white_space(structure.source)}{_OPTIONS}"
        case "regex":
            return _regex(structure.source) + _OPTIONS
        case "choice":
            # Lark's strings have JSON's escapes.
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.source))
            return f"start: {choices}{_OPTIONS}"
        case "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            return str(any_to_lark(structure.source)) + _OPTIONS


def _regex(pattern: str) -> str:
    import llguidance

    described = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))
    return str(described["grammars"][0]["lark_grammar"])


def _with_white_space(source: str) -> str:
    schema = json.loads(source)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get("x-guidance")
    if own is None or (isinstance(own, dict) and not own.keys() & {"whitespace_pattern", "whitespace_flexible"}):
        schema["x-guidance"] = {"whitespace_pattern": _WHITE_SPACE, **(own or {})}
    return json.dumps(schema)
