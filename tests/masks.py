"""A grammar without llguidance, for tests of what is done with masks: plain arithmetic says what may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify import LLM
from ramify.engine.core import EngineCore
from ramify.structured.mask_threads import Mask
from ramify.structured.matcher import Beginning, Ends, LocalMatcher, Matcher, bits_of


class Sevenths:
    """In the place of llguidance's matcher: a seventh of all tokens, another one after every token, and after `length`
    tokens the end alone."""

    def __init__(self, vocab_size: int, ends: Sequence[int], length: int = 12, output: Sequence[int] = ()) -> None:
        self.vocab_size, self.ends, self.length, self.output = vocab_size, ends, length, list(output)

    def allows(self, output: Sequence[int], token_id: int) -> bool:
        if len(output) >= self.length:
            return token_id in self.ends
        return (token_id + sum(output)) % 7 == len(output) % 7 and token_id not in self.ends

    def mask(self) -> Mask:
        end = [self.vocab_size] if len(self.output) >= self.length else []
        inside = [] if end else [each for each in range(self.vocab_size) if self.allows(self.output, each)]
        return bits_of([*inside, *end], self.vocab_size + 1)

    def deep_copy(self) -> Sevenths:
        return type(self)(self.vocab_size, self.ends, self.length, self.output)

    def consume_tokens(self, token_ids: Sequence[int]) -> None:
        assert self.try_consume_tokens(token_ids) == len(token_ids), "drawn where it was not allowed"

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id in self.ends or not self.allows(self.output, token_id):
                return count
            self.output.append(token_id)
        return len(token_ids)

    def rollback(self, count: int) -> None:
        del self.output[len(self.output) - count :]

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return "too much"


class NoThreads:
    """What MaskThreads do, one after the other."""

    def find(self, states: Sequence[Sevenths], rows: Sequence[int], into: Mask) -> None:
        assert len(set(map(id, states))) == len(states), "llguidance takes none twice"
        for state, row in zip(states, rows, strict=True):
            into[row] = state.mask()


def matcher_from(root: Sevenths, begun: Sequence[int] = ()) -> Matcher:
    threads: Any = NoThreads()
    return LocalMatcher(
        Beginning(lambda: root, root.vocab_size, Ends.of(root.ends, root.vocab_size), threads, tuple(begun))
    )


def begin_sevenths(vocab_size: int, length: int = 12) -> Any:
    """To begin matchers with, whatever structure is asked for."""
    return lambda _structure, ends, begun: matcher_from(Sevenths(vocab_size, ends, length), begun)


def follow_sevenths(llm: LLM, length: int = 12) -> None:
    """Whatever structure its requests ask for, they get this one."""

    class NoCheck:
        def check(self, structure: Any) -> None: ...

    llm._intake.grammars = NoCheck()  # type: ignore[assignment]
    core: EngineCore = llm.core
    core.begin_matcher = begin_sevenths(llm._intake.vocab_size, length)


def fits(token_ids: Sequence[int], vocab_size: int, ends: Sequence[int], length: int = 12) -> bool:
    rule = Sevenths(vocab_size, ends, length)
    return all(rule.allows(token_ids[:place], token_id) for place, token_id in enumerate(token_ids))
