"""What a load asks for: prompts, lengths, prefixes that are shared, and when requests arrive.

All of it follows from a seed and a request's number, so that several processes make one load together, and every server
that is measured with the same seed gets the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

# Common words: with a space before it, each is one token in most vocabularies, so words stand for tokens.
COMMON = """
the of and to in that is was for on as with his he be at by had not are but from have they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because
long each just state people too those little very world good men work three under life day still own last
might great right year old come
"""
WORDS = COMMON.split()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by number. `turn` tells runs apart, so that no prompt is ever sent twice to a server by accident."""

    model: str | None
    prompt: tuple[int, int]  # shortest and longest, in words or ids
    output: tuple[int, int]  # tokens of each answer
    chat: bool = False
    stream: bool = True
    n: int = 1
    shared: float = 0.0  # the share of each prompt that its group has in common
    groups: int = 1
    vocabulary: int | None = None  # prompts are token ids below this; None: words
    fields: dict[str, Any] = {}  # sent with every request, as they are
    seed: int = 0
    turn: str = ""

    def prompt_of(self, number: int) -> str | list[int]:
        chance = self._chance("prompt", number)
        length = chance.randint(*self.prompt)
        common = round(self.shared * length)
        vocabulary: Any = WORDS if self.vocabulary is None else range(self.vocabulary)
        drawn: list[Any] = []
        if common:
            drawn = self._chance("group", number % self.groups).choices(vocabulary, k=common)
        drawn += chance.choices(vocabulary, k=length - common)
        return " ".join(drawn) if self.vocabulary is None else drawn

    def max_tokens_of(self, number: int) -> int:
        return self._chance("output", number).randint(*self.output)

    def body_of(self, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt_of(number)}]
        else:
            body["prompt"] = self.prompt_of(number)
        body["max_tokens"] = self.max_tokens_of(number)
        if self.n != 1:
            body["n"] = self.n
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self.fields

    def _chance(self, what: str, number: int) -> random.Random:
        return random.Random(f"{self.seed}/{self.turn}/{what}/{number}")


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests arrive, `rate` a second: a Poisson process."""
    chance = random.Random(f"{seed}/arrivals")
    now = 0.0
    while True:
        now += chance.expovariate(rate)
        yield now
