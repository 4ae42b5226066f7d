"""Penalties, bias, bans and beams by kernels, against torch's sampler: random rows, drawn again and again.

After the first step the kernels are told nothing of what was drawn: they must have counted it themselves. Beams are
told, since what they take is not what their rows draw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify import MixtureConfig, SamplingParams
from ramify.config import LogprobsMode
from ramify.device.rows import upload
from ramify.engine.demands import LONGEST_BAD_WORD, Demands
from ramify.engine.plan import NOT_FINITE, Draw, StepResult, TokenReport
from ramify.gpu.controls import ControlSlots
from ramify.gpu.sampler import KernelSampler
from ramify.sampling import columns as column
from ramify.sampling.columns import Columns
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from ramify.structured.mask_threads import Mask
from ramify.structured.matcher import bits_of
from tests.masks import Sevenths, matcher_from

VOCAB = 2300  # two chunks, the last one short
STEPS = 6 if torch.cuda.is_available() else 2  # the interpreter takes its time
ENDS = frozenset({3, 2299})
BIAS = {7: 4.0, 2100: -3.5, 2299: 6.0, 12: -100.0}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.7, "temperature": 0.6},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    "presence": {"presence_penalty": 2.0, "top_k": 12},
    "bias": {"logit_bias": BIAS, "min_p": 0.05},
    "allowed": {"allowed_token_ids": [2, 7, 31, 32, 2047, 2048, 2298], "frequency_penalty": 0.3},
    "min tokens": {"min_tokens": 2, "logit_bias": {3: 50.0}},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": BIAS,
        "min_tokens": 3,
        "allowed_token_ids": list(range(0, 2300, 3)),
        "top_p": 0.9,
        "logprobs": 4,
    },
    "nothing left": {"allowed_token_ids": [3], "min_tokens": 9},
    "beams": {"strategy": "beam_search", "beam_width": 4},
    "controlled beams": {"strategy": "beam_search", "beam_width": 3, "repetition_penalty": 1.5, "top_k": 40},
    "reported beams": {"strategy": "beam_search", "beam_width": 3, "repetition_penalty": 1.7, "logprobs": 3},
}
# Words by their tokens; few tokens are likely (see `rows`), so beginnings do come up.
WORDS = ((5,), (1, 2), (2, 2, 1), (0, 1, 0, 2), (2298, 1))


def demands(name: str, number: int, *, words: bool = False, tracks: int = 1) -> Demands:
    params = SamplingParams(max_tokens=50, **ASKED[name])
    prompts = tuple([7, 2, number % 5, 2298 - track] for track in range(tracks))
    return Demands(
        params,
        number=number,
        seed=number,
        prompts=prompts,
        eos_token_ids=ENDS,
        bad_words=WORDS if words else (),
        longest_output=50,
    )


def rows(count: int, generator: torch.Generator) -> Tensor:
    logits = torch.randn(count, VOCAB, generator=generator)
    logits[:, :3] += 6.0
    return logits


def by_kernels(sampler: KernelSampler, logits: list[Tensor], draws: list[Draw], device: torch.device) -> StepResult:
    choice, columns = sampler.choose({draw.demands.choice for draw in draws}), Columns.of(draws)
    slots = columns.integers[column.SLOT] = sampler.settle(draws)
    following = [index for index, draw in enumerate(draws) if draw.matcher is not None]
    if following:
        sampler.follow(slots[following], [draws[index] for index in following])
    sampler.draw(
        [part.to(device) for part in logits],
        upload(columns.integers, device),
        upload(columns.floats, device),
        choice,
    )
    return sampler.fetch(choice)(range(len(draws)), draws)


def compare_reports(one: Sequence[TokenReport] | None, other: Sequence[TokenReport] | None) -> None:
    """Of a beam's candidates."""
    assert (one is None) == (other is None)
    for told, expected in zip(one or (), other or (), strict=True):
        assert told.rank == expected.rank
        assert told.logprob == pytest.approx(expected.logprob, abs=2e-5)
        np.testing.assert_array_equal(told.top_token_ids, expected.top_token_ids)
        np.testing.assert_allclose(told.top_logprobs, expected.top_logprobs, atol=2e-5)


def compare(one: StepResult, other: StepResult, *, mixed: bool = False) -> None:
    assert one.faults == other.faults
    sound = [index for index in range(len(one.token_ids)) if index not in one.faults]
    assert [one.token_ids[index] for index in sound if index not in other.expansions] == [
        other.token_ids[index] for index in sound if index not in other.expansions
    ]
    tolerance = 2e-3 if mixed else 2e-5
    for index in sound:
        if index not in other.expansions:
            assert one.logprobs[index] == pytest.approx(other.logprobs[index], abs=tolerance)
    assert one.reports.keys() == other.reports.keys()
    for index, told in one.reports.items():
        assert told.rank == other.reports[index].rank
        np.testing.assert_array_equal(told.top_token_ids, other.reports[index].top_token_ids)
        np.testing.assert_allclose(told.top_logprobs, other.reports[index].top_logprobs, atol=tolerance)
    assert one.expansions.keys() == other.expansions.keys()
    for index, candidates in one.expansions.items():
        expected = other.expansions[index]
        assert candidates.token_ids == expected.token_ids
        assert candidates.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
        assert candidates.weights == pytest.approx(expected.weights, abs=2e-5)
        compare_reports(candidates.reports, expected.reports)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_every_control_as_torch_does_it(mode: LogprobsMode, device: torch.device) -> None:
    """All at once; words too, from the third request on."""
    names = list(ASKED)
    asked = [demands(name, number, words=number > 2) for number, name in enumerate(names)]
    sampler, truth = KernelSampler(16, VOCAB, device, mode), Sampler(mode)
    generator = torch.Generator().manual_seed(5)
    outputs: list[list[int]] = [[] for _ in names]
    for position in range(STEPS):
        logits = rows(len(names), generator)
        draws = [
            Draw(str(number), 0, 0, position, (), each, tuple(outputs[number])) for number, each in enumerate(asked)
        ]
        expected = truth.sample([Source(logits, range(len(names)))], draws)
        blind = [draw if draw.demands.is_beam_search else draw._replace(output=()) for draw in draws]
        told = by_kernels(sampler, [logits], blind, device)
        compare(told, expected)
        assert told.faults, "one request forbids everything"
        for number, output in enumerate(outputs):
            beam = told.expansions.get(number)
            output.append(told.token_ids[number] if beam is None else beam.token_ids[1])


@pytest.mark.parametrize("tracks", [1, 2])
def test_grammars_mask_what_they_do_not_allow(tracks: int, device: torch.device) -> None:
    """Beside rows without one; a grammar that cannot be followed any further leaves nothing."""

    class Broken(Sevenths):
        def deep_copy(self) -> Broken:
            return self

        def is_error(self) -> bool:
            return True

        def mask(self) -> Mask:
            return bits_of([VOCAB], VOCAB + 1)  # the end, as llguidance says of what is in error

    grammar: dict[str, Any] = {"structured_outputs": {"regex": "any"}}
    params = [
        SamplingParams(**grammar),
        SamplingParams(),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, **grammar),
        SamplingParams(allowed_token_ids=list(range(0, VOCAB, 3)), top_k=20, **grammar),
        SamplingParams(**grammar),
    ]
    prompts = tuple([7, 2, 2298 - track] for track in range(tracks))
    asked = [
        Demands(each, number=number, seed=number, prompts=prompts, eos_token_ids=ENDS, longest_output=50)
        for number, each in enumerate(params)
    ]
    states = [Sevenths(VOCAB, sorted(ENDS), length=1 if number == 0 else 9) for number in range(4)]
    states.append(Broken(VOCAB, sorted(ENDS)))
    rules: list[Any] = [None if number == 1 else matcher_from(state) for number, state in enumerate(states)]
    mixer = None if tracks == 1 else Mixer(MixtureConfig())
    sampler, truth = KernelSampler(8, VOCAB, device, "raw", mixer), Sampler("raw", mixer)
    generator = torch.Generator().manual_seed(6)
    outputs: list[list[int]] = [[] for _ in asked]
    for position in range(2):
        logits = [rows(len(asked), generator) for _ in range(tracks)]
        draws = [
            Draw(str(n), 0, 0, position, (), each, tuple(outputs[n]), matcher=rules[n]) for n, each in enumerate(asked)
        ]
        assert {draw.demands.choice.kind for draw in draws} == {"plain", "filtered"}, "kernels serve them"
        expected = truth.sample([Source(part, range(len(asked))) for part in logits], draws)
        told = by_kernels(sampler, logits, draws, device)
        assert told.faults.keys() == expected.faults.keys() == {4}
        compare(told, replace(expected, faults=told.faults), mixed=tracks == 2)
        for number, output in enumerate(outputs):
            output.append(told.token_ids[number])


def test_bad_words_are_found_where_they_began(device: torch.device) -> None:
    """Few tokens are likely, so words begin all the time; most sequences come in the middle of their output."""
    sampler, truth = KernelSampler(16, VOCAB, device, "raw"), Sampler("raw")
    numbers = random.Random(2)
    longest = tuple(numbers.choice((0, 1, 2)) for _ in range(LONGEST_BAD_WORD))
    generator = torch.Generator().manual_seed(6)
    met = 0
    outputs = [[numbers.choice((0, 1, 2)) for _ in range(length)] for length in (0, 1, 2, 15, 16, 17, 40)]
    outputs[-1][-len(longest) + 1 :] = longest[:-1]
    asked = [replace(demands("plain", number), bad_words=(*WORDS, longest)) for number in range(len(outputs))]
    for step in range(2 * STEPS):
        logits = rows(len(outputs), generator)
        logits[:, :3] += 3.0
        draws = [Draw(str(n), 0, 0, len(outputs[n]), (), each, tuple(outputs[n])) for n, each in enumerate(asked)]
        expected = truth.sample([Source(logits, range(len(outputs)))], draws)
        free = truth.sample(
            [Source(logits, range(len(outputs)))],
            [draw._replace(demands=demands("plain", n)) for n, draw in enumerate(draws)],
        )
        met += sum(one != other for one, other in zip(free.token_ids, expected.token_ids, strict=True))
        blind = [draw._replace(output=draw.output if step == 0 else ()) for draw in draws]
        compare(by_kernels(sampler, [logits], blind, device), expected)
        for output, token in zip(outputs, expected.token_ids, strict=True):
            output.append(token)
    assert met > 1, "words got into the way"


def test_both_models_of_a_mixture(device: torch.device) -> None:
    names = ["plain", "repetition", "frequency", "bias", "min tokens", "all"]
    asked = [demands(name, number, words=number > 2, tracks=2) for number, name in enumerate(names)]
    mixer = Mixer(MixtureConfig())
    sampler, truth = KernelSampler(8, VOCAB, device, "raw", mixer), Sampler("raw", mixer)
    generator = torch.Generator().manual_seed(7)
    outputs: list[list[int]] = [[] for _ in names]
    for position in range(STEPS):
        logits = [rows(len(names), generator) for _ in range(2)]
        draws = [Draw(str(n), 0, 0, position, (), each, tuple(outputs[n])) for n, each in enumerate(asked)]
        expected = truth.sample([Source(part, range(len(names))) for part in logits], draws)
        blind = [draw._replace(output=draw.output if position == 0 else ()) for draw in draws]
        compare(by_kernels(sampler, logits, blind, device), expected, mixed=True)
        for output, token in zip(outputs, expected.token_ids, strict=True):
            output.append(token)


def test_a_model_that_fails_where_controls_forbid_has_failed(device: torch.device) -> None:
    """Of two models too, by kernels as by torch: what was not finite was gone before anybody looked."""
    names = ["allowed", "min tokens", "all", "plain"]
    asked = [demands(name, number, words=True, tracks=2) for number, name in enumerate(names)]
    mixer = Mixer(MixtureConfig())
    sampler, truth = KernelSampler(8, VOCAB, device, "raw", mixer), Sampler("raw", mixer)
    logits = [rows(len(names), torch.Generator().manual_seed(8)) for _ in range(2)]
    logits[0][0, 9], logits[1][1, 3], logits[0][2, 4] = torch.nan, torch.nan, torch.inf
    draws = [Draw(str(number), 0, 0, 0, (), each, ()) for number, each in enumerate(asked)]
    told = by_kernels(sampler, logits, draws, device)
    expected = truth.sample([Source(part, range(len(names))) for part in logits], draws)
    assert told.faults == expected.faults == dict.fromkeys(range(3), NOT_FINITE)
    assert told.token_ids[3] == expected.token_ids[3]


def test_slots_are_kept_given_away_and_written_again(device: torch.device) -> None:
    slots = ControlSlots(2, VOCAB, device)
    asked = [demands("repetition", number) for number in range(4)]

    def draw(number: int, output: list[int]) -> Draw:
        return Draw(str(number), 0, 0, len(output), (), asked[number], tuple(output))

    def marks(slot: int) -> dict[int, int]:
        return {token: mark for token, mark in enumerate(slots.tables.seen[slot].tolist()) if mark}

    one, other = slots.settle([draw(0, []), draw(1, [])]).tolist()
    assert sorted((one, other)) == [0, 1]
    assert slots.settle([draw(1, [4]), draw(0, [5])]).tolist() == [other, one]  # wherever they stand now
    assert slots.settle([draw(2, []), draw(1, [4, 4])]).tolist() == [one, other]  # 0 is not here, and gives way
    [back] = slots.settle([draw(0, [5, 6])]).tolist()
    assert marks(back) == {0: 1, 2: 1, 7: 1, 2298: 1, 5: 4, 6: 4}
    # What was drawn for it at position 3 was not kept: it is written again.
    assert slots.settle([draw(0, [5, 6, 8, 8])]).tolist() == [back]
    assert marks(back) == {0: 1, 2: 1, 7: 1, 2298: 1, 5: 4, 6: 4, 8: 8}


def test_who_has_no_controls_takes_no_slot(device: torch.device) -> None:
    slots = ControlSlots(1, VOCAB, device)
    draws = [Draw("0", 0, 0, 0, (), demands("plain", number)) for number in range(3)]
    assert list(slots.settle(draws)) == [column.NO_SLOT] * 3


def test_what_kernels_have_no_room_for_is_left_to_torch() -> None:
    sampler = KernelSampler(2, VOCAB, torch.device("cpu"), "raw")
    assert all(sampler.serves(demands(name, 0, words=True).choice) for name in ASKED)
    long = replace(demands("plain", 0), bad_words=(tuple(range(LONGEST_BAD_WORD + 1)),))
    assert not sampler.serves(long.choice)
    for options in (
        {"logits_processors": [lambda _, row: row]},
        {"strategy": "diverse", "n": 17, "diversity_penalty": 1.0},
        {"strategy": "without_replacement", "n": 20},
        {"logprobs": 21},
        {"strategy": "beam_search", "beam_width": 19},
        {"return_kept": "mass"},
    ):
        params = SamplingParams(**options)
        assert not sampler.serves(Demands(params, eos_token_ids=ENDS).choice)
