"""Speculation on a CPU's kernels: requests of all kinds get the same tokens with drafts and without."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM
from tests import bits
from tests.conftest import CheckpointMaker

VOCABULARY = 320


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama")


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), max_model_len=256, num_kv_blocks=512, **options)


def repeating_requests(count: int, numbers: random.Random) -> list[bits.Asked]:
    """Of all kinds, with few tokens to choose from, so that what was written before is written again."""
    asked = bits.random_requests(count, numbers, vocab_size=VOCABULARY, longest_prompt=60, most_tokens=24)
    few = [numbers.randrange(VOCABULARY) for _ in range(4)]
    return [
        bits.Asked(prompt, replace(params, allowed_token_ids=few[: numbers.randint(1, 4)]))
        if numbers.random() < 0.7
        else bits.Asked(prompt, params)
        for prompt, params in asked
    ]


@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_bits_are_the_same_with_drafts_where_they_are_batch_invariant(folder: Path, speculation: str) -> None:
    """Tokens, logprobs and ranks; with one request at a time, and with many beside each other."""
    numbers = random.Random(3)
    asked = repeating_requests(16, numbers)
    plain = bits.told_alone(engine(folder, batch_invariant=True), asked)
    drafting = engine(folder, batch_invariant=True, speculation=speculation)
    bits.check(plain, bits.told_alone(drafting, asked), asked)
    bits.check(plain, bits.told_together(drafting, asked, numbers), asked)
    stats = drafting.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_a_thousand_requests_get_the_same_tokens(folder: Path, speculation: str) -> None:
    numbers = random.Random(4)
    asked = repeating_requests(500, numbers)
    plain = [tokens(told) for told in bits.told_together(engine(folder), asked, numbers, waves=8)]
    drafting = engine(folder, speculation=speculation)
    drafted = [tokens(told) for told in bits.told_together(drafting, asked, numbers, waves=40)]
    assert plain == drafted
    assert drafting.stats()["accepted_tokens"] > 200


def tokens(told: list[Any]) -> list[tuple[int, ...]]:
    return [token_ids for token_ids, _, _ in told[1]]
