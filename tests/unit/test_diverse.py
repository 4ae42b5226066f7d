"""Diverse sampling: siblings step in order, and each is pushed from what earlier ones took in the same step."""

from __future__ import annotations

import pytest
import torch

from ramify import Request, SamplingParams
from ramify.outputs import RequestOutput
from ramify.sampling.draw import draw
from tests.fake import fake_engine, logits_after
from tests.noise import noise_keys
from tests.unit.test_engine import Tokens, run_all, tokens_of

PROMPT = [3, 1, 4]
END = 0


def generate(prompt: list[int] = PROMPT, **options: object) -> RequestOutput:
    engine = fake_engine(num_blocks=512)
    engine.add_request(Request("r", None, prompt, SamplingParams(**options)))  # type: ignore[arg-type]
    return run_all(engine)["r"]


def by_hand(*, n: int, seed: int, temperature: float, penalty: float, max_tokens: int) -> Tokens:
    """The formula, child by child and token by token: logits minus penalty times count, then temperature."""
    outputs: list[list[int]] = [[] for _ in range(n)]
    for position in range(max_tokens):
        taken: list[int] = []
        for child, output in enumerate(outputs):
            if output and output[-1] == END:
                continue
            logits = logits_after([*PROMPT, *output])
            for token in taken:
                logits[token] -= penalty
            keys = noise_keys([(seed, child, position)], torch.device("cpu"))
            scaled = (logits - logits.max()) / temperature
            token = int(draw(scaled[None], keys))
            output.append(token)
            taken.append(token)
    return [tuple(output) for output in outputs]


@pytest.mark.parametrize("penalty", [0.0, 0.5, 3.0, 100.0])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
def test_diverse_sampling_equals_the_formula(penalty: float, temperature: float) -> None:
    """At a low temperature siblings would mostly agree, so the penalty decides often."""
    for seed in range(6):
        output = generate(
            n=5, seed=seed, temperature=temperature, strategy="diverse", diversity_penalty=penalty, max_tokens=7
        )
        expected = by_hand(n=5, seed=seed, temperature=temperature, penalty=penalty, max_tokens=7)
        assert tokens_of(output) == expected


def test_no_penalty_changes_nothing() -> None:
    plain = generate(n=6, seed=11, temperature=0.5, max_tokens=9)
    diverse = generate(n=6, seed=11, temperature=0.5, max_tokens=9, strategy="diverse", diversity_penalty=0.0)
    assert tokens_of(plain) == tokens_of(diverse)


def distinct(outputs: Tokens, size: int) -> float:
    """distinct-n: the share of different n-grams among all of a set of outputs."""
    grams = [tokens[start : start + size] for tokens in outputs for start in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams)


def test_a_penalty_raises_distinct_n() -> None:
    def mean_distinct(size: int, penalty: float) -> float:
        values = []
        for seed in range(10):
            output = generate(
                n=6,
                seed=seed,
                temperature=0.3,
                strategy="diverse",
                diversity_penalty=penalty,
                max_tokens=8,
                ignore_eos=True,
            )
            values.append(distinct(tokens_of(output), size))
        return sum(values) / len(values)

    for size in (1, 2):
        assert mean_distinct(size, 0.0) < mean_distinct(size, 1.0) < mean_distinct(size, 4.0)


def test_a_huge_penalty_never_lets_siblings_meet_in_a_step() -> None:
    output = generate(
        n=8, seed=2, temperature=0.2, strategy="diverse", diversity_penalty=1e4, max_tokens=6, ignore_eos=True
    )
    for place in range(6):
        assert len({tokens[place] for tokens in tokens_of(output)}) == 8


def test_diverse_sets_beside_each_other_do_not_push_each_other() -> None:
    params = SamplingParams(n=3, seed=4, temperature=0.3, strategy="diverse", diversity_penalty=5.0, max_tokens=6)
    engine = fake_engine(num_blocks=512, max_num_seqs=16)
    for name in ("a", "b"):
        engine.add_request(Request(name, None, PROMPT, params))
    engine.add_request(Request("c", None, PROMPT, SamplingParams(n=4, seed=4, temperature=0.3, max_tokens=6)))
    outputs = run_all(engine)
    expected = by_hand(n=3, seed=4, temperature=0.3, penalty=5.0, max_tokens=6)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == expected
    assert tokens_of(outputs["c"])[0] == expected[0]  # the first sibling is pushed by nobody


def test_siblings_that_step_together_must_fit_together() -> None:
    from ramify import InvalidInputError

    engine = fake_engine(max_num_seqs=4, num_blocks=16, block_size=4)
    diverse = {"strategy": "diverse", "diversity_penalty": 1.0}
    with pytest.raises(InvalidInputError, match="max_num_seqs = 4"):
        engine.add_request(Request("r", None, [1], SamplingParams(n=5, **diverse)))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="max_num_seqs = 4"):
        engine.add_request(Request("r", None, [1], SamplingParams(strategy="beam_search", beam_width=5)))
    with pytest.raises(InvalidInputError, match="needs 19 KV blocks, the cache has 16"):
        engine.add_request(Request("r", None, [1] * 12, SamplingParams(n=4, max_tokens=16, **diverse)))  # type: ignore[arg-type]
    narrow = fake_engine(max_num_batched_tokens=3)
    with pytest.raises(InvalidInputError, match="max_num_batched_tokens must be at least 4"):
        narrow.add_request(Request("r", None, [1], SamplingParams(strategy="beam_search", beam_width=4)))
    assert not engine.has_unfinished()
