"""A grammar without llguidance, for tests of what is done with masks: plain arithmetic says what may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify import LLM
from ramify.structured.matcher import Mask, bits_of


class Sevenths:
    """A seventh of all tokens, another one after every token, and after `length` tokens the ends alone."""

    def __init__(self, vocab_size: int, ends: Sequence[int], length: int = 12) -> None:
        self.vocab_size, self.ends, self.length = vocab_size, ends, length

    def allows(self, output: Sequence[int], token_id: int) -> bool:
        if len(output) >= self.length:
            return token_id in self.ends
        return (token_id + sum(output)) % 7 == len(output) % 7 and token_id not in self.ends

    def fork(self) -> Sevenths:
        return self

    def allowed_after(self, output: Sequence[int], num_presumed: int = 0) -> Mask | None:
        presumed = range(len(output) - num_presumed, len(output))
        if not all(self.allows(output[:place], output[place]) for place in presumed):
            return None
        allowed = [token_id for token_id in range(self.vocab_size) if self.allows(output, token_id)]
        return bits_of(allowed, self.vocab_size)


def follow_sevenths(llm: LLM, length: int = 12) -> None:
    """Whatever structure its requests ask for, they get this one."""
    vocab_size = llm._intake.vocab_size

    class NoCheck:
        def check(self, structure: Any) -> None: ...

    llm._intake.grammars = NoCheck()  # type: ignore[assignment]
    llm.core.begin_matcher = lambda _structure, ends, _begun: Sevenths(vocab_size, ends, length)  # type: ignore[assignment, return-value]


def fits(token_ids: Sequence[int], vocab_size: int, ends: Sequence[int], length: int = 12) -> bool:
    rule = Sevenths(vocab_size, ends, length)
    return all(rule.allows(token_ids[:place], token_id) for place, token_id in enumerate(token_ids))
