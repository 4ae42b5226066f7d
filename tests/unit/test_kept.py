"""What trainers read beside tokens: the kept mass and ids of every draw, and raw and processed logprobs together."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from ramify import InvalidInputError, Kept, SamplingParams
from ramify.config import MixtureConfig
from ramify.engine.request import Request
from ramify.sampling.mixing import Mixer
from tests.drive import finish
from tests.fake import fake_engine, logits_after
from tests.reference_sampler import reference_controls, reference_row

PROMPT = [1, 2, 3, 4, 5]
WAYS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2, "temperature": 1.7},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6},
    {"top_p": 0.5, "repetition_penalty": 1.4, "logit_bias": {7: 3.0}},
    {"allowed_token_ids": [3, 4, 9, 11], "top_k": 2},
    {"top_k": 4, "strategy": "diverse", "diversity_penalty": 0.0},
    {"top_k": 6, "strategy": "arithmetic"},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_kept_mass_and_ids_are_those_of_the_float64_reference(way: dict[str, Any], runs_ahead: bool) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, return_kept="ids", logprobs=0, **way)
    engine = fake_engine(logprobs_mode="both", runs_ahead=runs_ahead)
    beside = SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True)  # a neighbour that asks for nothing
    asked, neighbour = finish(engine, [(PROMPT, params), (PROMPT, beside)])
    num_compared = 0
    for sample in asked.outputs:
        assert sample.kept is not None
        assert sample.processed_logprobs is not None
        assert sample.logprobs is not None
        assert len(sample.kept) == len(sample.processed_logprobs) == len(sample.token_ids) == 6
        for place, (token_id, kept) in enumerate(zip(sample.token_ids, sample.kept, strict=True)):
            output = list(sample.token_ids[:place])
            logits = logits_after([*PROMPT, *output]).tolist()
            row = reference_row(logits, params, prompt=PROMPT, output=output)
            if row.undecided:
                continue
            num_compared += 1
            controlled = reference_controls(logits, params, prompt=PROMPT, output=output)
            weights = [math.exp(value / params.temperature) for value in controlled]
            mass = math.fsum(weights[each] for each in row.kept) / math.fsum(weights)
            assert set(kept.token_ids or ()) == row.kept
            assert list(kept.token_ids or ()) == sorted(row.kept)
            assert kept.mass == pytest.approx(mass, abs=1e-6)
            drawn_from = sample.processed_logprobs[place][token_id].logprob
            assert drawn_from == pytest.approx(math.log(row.probabilities[token_id]), abs=1e-5)
            # The identity that a trainer's importance ratio rests on.
            assert drawn_from == pytest.approx(math.log(weights[token_id] / math.fsum(weights) / kept.mass), abs=1e-5)
            raw = math.exp(logits[token_id]) / math.fsum(map(math.exp, logits))
            assert sample.logprobs[place][token_id].logprob == pytest.approx(math.log(raw), abs=1e-5)
    assert num_compared >= 15
    plain = finish(fake_engine(), [(PROMPT, beside)])[0]
    assert [sample.token_ids for sample in neighbour.outputs] == [sample.token_ids for sample in plain.outputs]
    assert all(sample.kept is None and sample.logprobs is None for sample in neighbour.outputs)


def test_mass_alone_has_no_ids_and_no_logprobs_and_the_same_tokens() -> None:
    options: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 5, "top_p": 0.6, "ignore_eos": True}
    told, plain = (
        finish(fake_engine(), [(PROMPT, SamplingParams(return_kept=kind, **options))])[0] for kind in ("mass", None)
    )
    assert [sample.token_ids for sample in told.outputs] == [sample.token_ids for sample in plain.outputs]
    for sample in told.outputs:
        assert sample.logprobs is None
        assert sample.processed_logprobs is None
        assert sample.kept is not None
        assert all(kept.token_ids is None and 0.6 <= kept.mass <= 1 for kept in sample.kept)
    assert all(sample.kept is None for sample in plain.outputs)


def test_a_greedy_draw_is_from_one_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, return_kept="ids")
    [sample] = finish(fake_engine(), [(PROMPT, params)])[0].outputs
    assert sample.kept is not None
    for place, (token_id, kept) in enumerate(zip(sample.token_ids, sample.kept, strict=True)):
        row = logits_after([*PROMPT, *sample.token_ids[:place]]).double().softmax(-1)
        assert kept.token_ids == (token_id,)
        assert kept.mass == pytest.approx(float(row[token_id]), abs=1e-6)


def test_two_models_tell_what_was_kept_of_their_mixture() -> None:
    engine = fake_engine(num_models=2, mixer=Mixer(MixtureConfig()))
    params = SamplingParams(max_tokens=4, seed=2, top_k=3, ignore_eos=True, return_kept="ids")
    engine.add_request(Request("pair", None, PROMPT, params, other_prompts=[(1, [9, 8])]))
    outputs = [output for _ in range(8) for output in engine.step() if output.finished]
    [sample] = outputs[0].outputs
    assert sample.kept is not None
    assert [len(kept.token_ids or ()) for kept in sample.kept] == [3] * 4
    assert all(0 < kept.mass < 1 for kept in sample.kept)


def test_deltas_tell_each_token_once() -> None:
    params = SamplingParams(n=2, seed=1, top_k=3, max_tokens=4, ignore_eos=True, return_kept="mass")
    whole = finish(fake_engine(), [(PROMPT, params)])[0]
    engine = fake_engine()
    engine.add_request(Request("streamed", None, PROMPT, params.clone(output_kind="delta")))
    told: dict[int, list[Kept]] = {0: [], 1: []}
    while engine.has_unfinished():
        for output in engine.step():
            for sample in output.outputs:
                assert len(sample.kept or ()) == len(sample.token_ids)
                told[sample.index] += sample.kept or ()
    assert [tuple(told[index]) for index in (0, 1)] == [sample.kept for sample in whole.outputs]


def test_both_kinds_of_logprobs_for_beams() -> None:
    """Beams score the processed distribution: what is told of their tokens adds up to their score."""
    params = SamplingParams(
        strategy="beam_search", beam_width=3, n=3, max_tokens=4, top_k=4, logprobs=1, ignore_eos=True, length_penalty=0
    )
    output = finish(fake_engine(logprobs_mode="both"), [(PROMPT, params)])[0]
    for sample in output.outputs:
        assert sample.processed_logprobs is not None
        rows = zip(sample.token_ids, sample.processed_logprobs, strict=True)
        assert math.fsum(row[token_id].logprob for token_id, row in rows) == pytest.approx(sample.score, abs=1e-4)
    scores = [sample.score or 0.0 for sample in output.outputs]
    assert all(better >= worse for better, worse in pairwise(scores))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"return_kept": "all"}, "return_kept must be one of"),
        ({"return_kept": True}, "return_kept must be one of"),
        ({"return_kept": "mass", "strategy": "beam_search"}, "return_kept has no meaning with strategy 'beam_search'"),
        ({"return_kept": "ids", "strategy": "without_replacement", "n": 2}, "return_kept has no meaning"),
        ({"return_kept": "mass", "output_kind": "growth"}, "return_kept is told with outputs"),
    ],
)
def test_what_cannot_be_told_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SamplingParams(**fields)
