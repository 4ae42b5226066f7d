"""What is asked for as a grammar in Lark's notation, which llguidance reads."""

from __future__ import annotations

import json

from ramify.structured_outputs import Structure, with_json_space

# Every spelling of the grammar's text may be drawn: a token is masked only if no text of the grammar goes on with it.
# Last, so that a caller's lines keep their numbers.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


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
    return json.dumps(with_json_space(schema))
