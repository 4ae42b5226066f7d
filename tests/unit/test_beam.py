"""Beam search on numbers alone: against brute force over a toy vocabulary, and the rules one by one."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.demands import num_candidates
from ramify.engine.search.advance import Candidates, Continuation, Independent
from ramify.engine.search.beam import BeamSearch
from tests.beam_oracle import Tokens, Weights, oracle


def toy_model(seed: int, vocabulary: int) -> Weights:
    def weights(tokens: Tokens) -> list[float]:
        numbers = random.Random(f"{seed}{tokens}")
        logits = [numbers.gauss(0, 1.5) for _ in range(vocabulary)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return weights


def search(model: Weights, **options: Any) -> list[tuple[Tokens, float]]:
    """Drives a BeamSearch as the engine does: each beam shows its likeliest tokens, decisions are carried out."""
    beams = BeamSearch(**options)
    count = num_candidates(options["beam_width"], len(options["end_token_ids"]))
    tokens: dict[int, Tokens] = {0: ()}
    running = [0]
    for _ in range(options["longest_output"]):
        shown = []
        for child in running:
            after = sorted(enumerate(model(tokens[child])), key=lambda pair: -pair[1])[:count]
            token_ids, weights = zip(*after, strict=True)
            shown.append(Candidates(child, child, token_ids, weights, weights))
        decisions = beams.advance(shown)
        grown = {
            continuation.child: (*tokens[continuation.parent], continuation.token_id)
            for continuation in (*decisions.continued, *decisions.ended)
        }
        running = [continuation.child for continuation in decisions.continued]
        tokens |= grown
        assert beams.kept() == {standing.child for standing in beams.ranking()}
        if decisions.over:
            break
    assert decisions.over
    return [(tokens[child], score) for child, score, *_ in beams.ranking()]


@given(
    seed=st.integers(0, 10_000),
    groups=st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (4, 4)]),
    penalty=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    rule=st.sampled_from([True, False, "never"]),
    ends=st.sets(st.integers(0, 8), max_size=3),
    longest=st.integers(1, 6),
)
@settings(max_examples=200)
def test_beams_and_group_beams_equal_the_formula_written_out(
    *,
    seed: int,
    groups: tuple[int, int],
    penalty: float,
    length_penalty: float,
    rule: Any,
    ends: set[int],
    longest: int,
) -> None:
    options: dict[str, Any] = {
        "beam_width": groups[0],
        "num_groups": groups[1],
        "diversity_penalty": penalty if groups[1] > 1 else 0.0,
        "longest_output": longest,
        "end_token_ids": frozenset(ends),
        "length_penalty": length_penalty,
        "early_stopping": rule,
    }
    model = toy_model(seed, 9)
    found, expected = search(model, **options), oracle(model, **options)
    assert sorted(tokens for tokens, _ in found) == sorted(tokens for tokens, _ in expected)
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize("longest", [1, 2, 3, 4])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_outputs(longest: int) -> None:
    """With room for every prefix nothing is pruned, and the winner is the likeliest of all outputs there are."""
    model, vocabulary = toy_model(7, 4), 4
    found = search(
        model,
        beam_width=vocabulary**longest,
        longest_output=longest,
        end_token_ids=frozenset({0}),
        length_penalty=0.0,
        early_stopping="never",
    )
    outputs: dict[Tokens, float] = {}
    for tokens in product(range(vocabulary), repeat=longest):
        cut = tokens.index(0) + 1 if 0 in tokens else longest
        outputs[tokens[:cut]] = sum(model(tokens[:place])[tokens[place]] for place in range(cut))
    best = max(outputs, key=lambda tokens: outputs[tokens])
    assert found[0][0] == best
    assert found[0][1] == pytest.approx(outputs[best])


def test_no_penalty_makes_groups_equal() -> None:
    options: dict[str, Any] = {"longest_output": 4, "end_token_ids": frozenset({0})}
    alone = search(toy_model(3, 9), beam_width=2, **options)
    twice = search(toy_model(3, 9), beam_width=4, num_groups=2, diversity_penalty=0.0, **options)
    assert sorted(twice) == sorted(alone * 2)


def test_a_large_penalty_keeps_groups_apart_at_every_place() -> None:
    options: dict[str, Any] = {"longest_output": 3, "end_token_ids": frozenset[int](), "length_penalty": 0.0}
    found = search(toy_model(5, 9), beam_width=4, num_groups=2, diversity_penalty=50.0, **options)
    outputs = [tokens for tokens, _ in found]
    assert len(set(outputs)) == 4
    for tokens in outputs:  # the second group never takes what the first took: only one's own group meets one
        meeting = [other for other in outputs if any(a == b for a, b in zip(tokens, other, strict=True))]
        assert len(meeting) <= 2
    assert min(score for _, score in found) > -50  # it chose around the penalty


def test_the_rules_of_early_stopping_change_what_is_found() -> None:
    """Somewhere in many searches each of the three rules must make a difference."""
    options: dict[str, Any] = {"beam_width": 3, "longest_output": 9, "length_penalty": 1.0}
    results: dict[Any, list[Any]] = {True: [], False: [], "never": []}
    for seed in range(40):
        for rule, made in results.items():
            made.append(search(toy_model(seed, 9), end_token_ids=frozenset({0, 1}), early_stopping=rule, **options))
    assert results[True] != results[False]
    assert results[False] != results["never"]


@pytest.mark.parametrize("penalty", [1e6, -1e6])
def test_no_length_penalty_breaks_the_arithmetic(penalty: float) -> None:
    found = search(
        toy_model(1, 9), beam_width=2, longest_output=5, end_token_ids=frozenset({0}), length_penalty=penalty
    )
    assert len(found) == 2
    assert not any(math.isnan(score) for _, score in found)


def test_few_tokens_give_fewer_beams_and_no_impossible_ones() -> None:
    """Two tokens have a probability at all: four beams cannot be had from the first step."""

    def model(_tokens: Tokens) -> list[float]:
        return [-math.inf, math.log(0.5), math.log(0.5), -math.inf]

    found = search(model, beam_width=4, longest_output=1, end_token_ids=frozenset())
    assert sorted(tokens for tokens, _ in found) == [(1,), (2,)]


def test_independent_children_keep_what_they_drew() -> None:
    decisions = Independent().advance([Candidates(0, 0, [5], [-0.5]), Candidates(0, 1, [7], [-1.0])])
    assert decisions.continued == [Continuation(0, 0, 5, -0.5), Continuation(0, 1, 7, -1.0)]
    assert (decisions.ended, decisions.over) == ([], False)
