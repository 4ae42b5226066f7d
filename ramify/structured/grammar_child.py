"""How grammars are built, and the process that tries each one first (`process/bounded_child.py` runs it).

A schema may take llguidance any time and memory to build (`"multipleOf": 999983` takes twenty seconds and 300 MB), and
a call into it cannot be broken off. So a grammar is built in a process that may be, and here only if that went well.
This file imports nothing of Ramify.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance

# What one grammar may take. A step of a matcher is some 15 ms at most, and its lexer some 40 MB.
STEP_LEXER_FUEL = 100_000
STEP_ITEMS = 25_000
LEXER_STATES = 20_000
FIRST_STEPS = 4  # tried before a grammar counts as sound


class Vocabulary:
    """What llguidance wants to know of a tokenizer: the bytes of every token. It never asks for the tokens of a text:
    whatever spells the grammar's text may be drawn, and not one spelling alone."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        """The last token is the end of a text."""
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = len(tokens) - 1

    def __call__(self, _text: str) -> list[int]:
        raise AssertionError("no text is tokenized for a grammar")

    def tokenizer(self, slices: list[str] | None = None) -> Any:
        """slices: patterns whose tokens are walked through apart, or not at all where all of them may come."""
        return llguidance.LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.eos_token_id, slices=slices)


def build(tokenizer: Any, lark: str) -> Any:
    """A matcher at its beginning; its `get_error` says if the grammar is none."""
    limits = llguidance.LLParserLimits(
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)


def packed(tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> bytes:
    """A vocabulary as the first frame."""
    return json.dumps([[token.hex() for token in tokens], list(special_token_ids)]).encode()


def begin(vocabulary: bytes) -> Callable[[bytes], bytes]:
    spelled, special_token_ids = json.loads(vocabulary)
    tokenizer = Vocabulary(list(map(bytes.fromhex, spelled)), special_token_ids).tokenizer()

    def answer(lark: bytes) -> bytes:
        """What is wrong with a grammar; nothing if it is sound."""
        matcher = build(tokenizer, lark.decode())
        for _ in range(FIRST_STEPS):
            if matcher.is_error() or matcher.is_stopped():
                break
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not mask:
                break
            matcher.consume_token((mask & -mask).bit_length() - 1)
        return str(matcher.get_error()).encode(errors="replace")

    return answer
