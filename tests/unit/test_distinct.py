"""Draws without replacement against brute force: who is drawn how often, and what is estimated from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ramify import Inclusion, InvalidInputError, SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.engine.search.advance import Candidates
from ramify.engine.search.distinct import WithoutReplacement
from ramify.sampling.pipeline import Sampler, Source
from tests.drive import finish
from tests.fake import fake_engine

LOGITS = torch.tensor([[1.0, 0.2, -0.5, 0.7], [0.0, 2.0, 0.1, -1.0]])  # after an even token, after an odd one
END = 3
Sequences = list[tuple[tuple[int, ...], Inclusion]]


def exact() -> dict[tuple[int, ...], float]:
    """Every sequence of up to two tokens: 3 ends one."""
    first, second = LOGITS.double().softmax(-1).tolist()
    shares: dict[tuple[int, ...], float] = {(END,): first[END]}
    for a in range(3):
        shares |= {(a, b): first[a] * (second if a % 2 else first)[b] for b in range(4)}
    return shares


def draw_some(seed: int, n: int) -> Sequences:
    """The samples of one request, largest key first."""
    params = SamplingParams(n=n, strategy="without_replacement")
    demands = Demands(params, seed=seed, eos_token_ids=frozenset({END}))
    strategy = WithoutReplacement(num_samples=n, longest_output=2, end_token_ids=frozenset({END}))
    sampler, over = Sampler(), False
    outputs: dict[int, tuple[int, ...]] = {0: ()}
    while not over:
        draws = [
            Draw("r", child, child, len(outputs[child]), (), demands, outputs[child]) for child in strategy.running
        ]
        rows = [draw.output[-1] % 2 if draw.output else 0 for draw in draws]
        expansions = sampler.sample([Source(LOGITS, rows)], draws).expansions
        told = [Candidates(draw.parent, draw.child, *expansions[index]) for index, draw in enumerate(draws)]
        decisions = strategy.advance(told)
        before = dict(outputs)
        for token in (*decisions.continued, *decisions.ended):
            outputs[token.child] = (*before[token.parent], token.token_id)
        over = decisions.over
    found = []
    for standing in strategy.ranking():
        inclusion = strategy.inclusion(standing.child)
        assert inclusion is not None
        found.append((outputs[standing.child], inclusion))
    return found


@pytest.fixture(scope="module")
def drawn() -> list[Sequences]:
    return [draw_some(seed, 3) for seed in range(400)]


def test_samples_are_distinct_and_know_their_probability(drawn: list[Sequences]) -> None:
    for samples in drawn:
        assert len({sequence for sequence, _ in samples}) == 3
        for sequence, inclusion in samples:
            assert inclusion.logprob == pytest.approx(math.log(exact()[sequence]), abs=1e-5)


def test_sequences_are_drawn_as_often_as_without_replacement(drawn: list[Sequences]) -> None:
    """Chances to be first, and to be among the first two, by brute force; five standard deviations are allowed."""
    shares = exact()
    for sequence, share in shares.items():
        among = share + sum(other * share / (1 - other) for name, other in shares.items() if name != sequence)
        for chance, count in (
            (share, sum(samples[0][0] == sequence for samples in drawn)),
            (among, sum(sequence in (samples[0][0], samples[1][0]) for samples in drawn)),
        ):
            assert abs(count - 400 * chance) < 5 * math.sqrt(400 * chance * (1 - chance)) + 1


def test_estimates_are_unbiased(drawn: list[Sequences]) -> None:
    shares = exact()
    functions: list[Any] = [
        lambda _: 1.0,
        lambda sequence: float(sequence[0] == 1),
        lambda sequence: len(sequence) ** 2,
    ]
    for function in functions:
        estimates = [sum(inclusion.weight * function(sequence) for sequence, inclusion in samples) for samples in drawn]
        truth = sum(share * function(sequence) for sequence, share in shares.items())
        assert abs(np.mean(estimates) - truth) < 5 * np.std(estimates) / math.sqrt(len(estimates))


def test_fewer_samples_are_the_first_of_more() -> None:
    for seed in range(10):
        many = [sequence for sequence, _ in draw_some(seed, 8)]
        for n in (1, 3, 5):
            assert [sequence for sequence, _ in draw_some(seed, n)] == many[:n]


def test_all_there_are_weigh_what_they_are_worth() -> None:
    samples = draw_some(1, 20)
    assert {sequence for sequence, _ in samples} == set(exact())
    for sequence, inclusion in samples:
        assert inclusion.threshold == -math.inf
        assert inclusion.weight == pytest.approx(exact()[sequence], rel=1e-5)


@pytest.mark.parametrize("n", [1, 5])
def test_an_engine_gives_the_same_in_every_schedule(n: int) -> None:
    params = SamplingParams(n=n, seed=3, strategy="without_replacement", max_tokens=6, temperature=1.5, logprobs=2)
    roomy = finish(fake_engine(), [([7, 8, 9], params)])[0]
    assert len({completion.token_ids for completion in roomy.outputs}) == n
    keys = [completion.score or 0.0 for completion in roomy.outputs]
    assert keys == sorted(keys, reverse=True)
    assert all(completion.inclusion is not None and completion.logprobs is not None for completion in roomy.outputs)
    other = SamplingParams(n=2, seed=1, max_tokens=9)
    for narrow in (fake_engine(num_blocks=16), fake_engine(max_num_batched_tokens=6), fake_engine(runs_ahead=True)):
        beside = finish(narrow, [([7, 8, 9], params), ([1, 2], other)])[0]
        assert [completion.token_ids for completion in beside.outputs] == [
            completion.token_ids for completion in roomy.outputs
        ]
        assert [completion.inclusion for completion in beside.outputs] == [
            completion.inclusion for completion in roomy.outputs
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"best_of": 4},
        {"temperature": 0},
        {"stop": "x"},
        {"output_kind": "delta"},
        {"mirostat_tau": 3.0},
        {"xtc_probability": 0.1},
        {"n": 1, "seed": 1, "child": 1},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        SamplingParams(**{"strategy": "without_replacement", "n": 2, **options})
