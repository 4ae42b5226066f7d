"""Rules that bend a distribution or cut more of it, by kernels: against torch's sampler, and against float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify import MixtureConfig, SamplingParams
from ramify.config import LogprobsMode
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.gpu.kernels.bending import Bends, bend
from ramify.gpu.kernels.narrowing import Cuts, narrow
from ramify.gpu.kernels.race import BlockScores, KeyWords, score_blocks
from ramify.gpu.sampler import KernelSampler
from ramify.sampling import shaping, truncation
from ramify.sampling.draw import COIN_LEVEL, coin
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from tests.equivalence.test_more_controls import RULES as SLOW_RULES
from tests.equivalence.test_more_controls import Case
from tests.kernels.test_controls import by_kernels, compare

VOCAB = 2300
LARGE_VOCAB = 5000  # more than one tile
LEAST = -1e20  # a logprob: what is less was forbidden with a large number, and is gone in float32
STEPS = 6 if torch.cuda.is_available() else 1  # the interpreter takes its time
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "typical_p": 0.5},
    {"top_n_sigma": 1.0, "temperature": 1.7},
    {"typical_p": 0.6},
    {"typical_p": 0.2, "temperature": 0.6, "top_k": 40},
    {"epsilon_cutoff": 0.01, "logprobs": 3},
    {"eta_cutoff": 0.02, "temperature": 1.3},
    {"top_a": 0.3, "min_p": 0.01},
    {"p_less": True, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "top_p": 0.95, "logprobs": 2},
    {"dynatemp_range": 0.5, "temperature": 1.0},
    {"dynatemp_range": 0.8, "dynatemp_exponent": 2.5, "temperature": 0.8, "top_n_sigma": 2.0},
    {"smoothing_factor": 0.3, "temperature": 0.9, "top_p": 0.8},
    {"repetition_penalty": 1.5, "logit_bias": {2: -3.0}, "typical_p": 0.9, "epsilon_cutoff": 1e-5, "logprobs": 4},
    {"top_n_sigma": 1.5, "smoothing_factor": 0.2, "eta_cutoff": 0.001, "top_a": 0.1, "p_less": True},
    {"strategy": "beam_search", "beam_width": 3, "typical_p": 0.8, "top_n_sigma": 4.0},
]


def demands(number: int, params: dict[str, Any], *, tracks: int = 1) -> Demands:
    asked = SamplingParams(max_tokens=50, **params)
    return Demands(asked, number=number, seed=number, prompts=([1, 2],) * tracks, longest_output=50)


def rows(count: int, generator: torch.Generator) -> Tensor:
    """Some likely tokens; ties where nothing is listed in order, and rows so flat that what is listed may be drawn."""
    logits = 2 * torch.randn(count, VOCAB, generator=generator)
    logits[:, :6] += torch.linspace(5, 8, 6)
    tied = [row for row in (4, 7, 9, 10, 14) if row < count]
    logits[tied] = (2 * logits[tied]).round() / 2
    logits[15:] *= 0.2
    return logits


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_every_rule_as_torch_does_it(mode: LogprobsMode, device: torch.device) -> None:
    """All at once: rows that ask for none stand beside those that do."""
    asked = [demands(number, params) for number, params in enumerate(ASKED)]
    assert {each.sampler for each in asked} == {"plain", "filtered", "shaped"}
    sampler, truth = KernelSampler(32, VOCAB, device, mode), Sampler(mode)
    generator = torch.Generator().manual_seed(3)
    outputs: list[list[int]] = [[] for _ in asked]
    for position in range(STEPS):
        logits = rows(len(asked), generator)
        draws = [Draw(str(n), 0, 0, position, (), each, tuple(outputs[n])) for n, each in enumerate(asked)]
        expected = truth.sample([Source(logits, range(len(asked)))], draws)
        told = by_kernels(sampler, [logits], draws, device)
        compare(told, expected)
        for number, output in enumerate(outputs):
            beam = told.expansions.get(number)
            output.append(told.token_ids[number] if beam is None else beam.token_ids[1])


def test_what_is_drawn_from_equals_a_slow_reference(device: torch.device) -> None:
    """Some rules at once, on rows of all kinds, in float64: which tokens are left, and their logprobs."""
    numbers = random.Random(3)
    names = sorted(set(SLOW_RULES) - {"no_repeat_ngram_size", "dry_multiplier"})
    size, decided = 20, 0  # as many as are reported
    different = []
    sampler = KernelSampler(32, size, device, "processed")
    for _ in range(40 * STEPS if torch.cuda.is_available() else 1):
        cases = [Case(numbers, size, *numbers.sample(names, numbers.randint(1, 3))) for _ in range(24)]
        draws = [replace_number(case.draw(), number) for number, case in enumerate(cases)]
        told = by_kernels(sampler, [torch.tensor([case.logits for case in cases])], draws, device)
        for number, case in enumerate(cases):
            expected = case.reference(excludes=case.excludes())
            is_large = max(abs(value) for value in case.logits if value > -1e29) > 1e3
            if expected.row.max() == -math.inf or expected.undecided or is_large:
                continue
            decided += 1
            report, theirs = told.reports[number], expected.logprobs
            ours = np.full(size, -np.inf)
            ours[report.top_token_ids] = report.top_logprobs
            likely = theirs > -30
            wrong = (ours > LEAST) != (theirs > LEAST)
            wrong[likely] |= ~(np.abs(ours[likely] - theirs[likely]) < 1e-3)
            if wrong.any():
                asked = {
                    name: getattr(case.params, name)
                    for name in names
                    if getattr(case.params, name) != getattr(SamplingParams(), name)
                }
                different.append((asked, case.params.temperature, ours[wrong], theirs[wrong], max(case.logits)))
    assert not different, f"{len(different)} of {decided}: {different[:12]}"
    assert decided > 10


def replace_number(draw: Draw, number: int) -> Draw:
    """As a request of its own."""
    return draw._replace(demands=replace(draw.demands, number=number))


def test_rules_act_on_a_mixture(device: torch.device) -> None:
    asked = [
        demands(0, {}, tracks=2),
        demands(1, {"typical_p": 0.7, "temperature": 0.7}, tracks=2),
        demands(2, {"epsilon_cutoff": 0.02, "repetition_penalty": 1.3}, tracks=2),
        demands(3, {"top_p": 0.5}, tracks=2),
    ]
    mixer = Mixer(MixtureConfig())
    sampler, truth = KernelSampler(8, VOCAB, device, "raw", mixer), Sampler("raw", mixer)
    generator = torch.Generator().manual_seed(4)
    logits = [rows(len(asked), generator) for _ in range(2)]
    draws = [Draw(str(number), 0, 0, 0, (), each, ()) for number, each in enumerate(asked)]
    expected = truth.sample([Source(part, range(len(asked))) for part in logits], draws)
    compare(by_kernels(sampler, logits, draws, device), expected, mixed=True)


def test_rows_beside_those_with_rules_keep_their_bits(device: torch.device) -> None:
    """Whoever asks for nothing is drawn from the same numbers."""
    logits = rows(3, torch.Generator().manual_seed(5)).to(device)
    temperatures = torch.tensor([0.7, 0.0, 1.3], device=device)
    scores = BlockScores.empty(3, VOCAB, device)
    score_blocks(logits, temperatures, scores)
    bent, bent_temperatures = torch.empty_like(logits), torch.empty_like(temperatures)
    asked = Bends(*(torch.zeros(3, device=device) for _ in Bends._fields))
    bend(logits, temperatures, scores, asked, bent=bent, bent_temperatures=bent_temperatures)
    assert torch.equal(bent, logits)
    assert torch.equal(bent_temperatures, temperatures)


THRESHOLD = 5e-4  # of xtc
TRUTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "typical_p": truncation.typical_p,
    "epsilon": truncation.epsilon_cutoff,
    "eta": truncation.eta_cutoff,
    "top_a": truncation.top_a,
    "p_less": lambda logits, _: truncation.p_less(logits),
    "xtc_probability": lambda logits, _: truncation.xtc(logits, torch.full((1,), THRESHOLD, dtype=torch.float64)),
}
KINDS = ("normal", "sharp", "uniform", "ties", "spike", "impossible")


def _row(kind: str, generator: torch.Generator) -> Tensor:
    row = torch.randn(LARGE_VOCAB, generator=generator)
    if kind == "sharp":
        row *= 4
    elif kind == "uniform":
        row.zero_()
    elif kind == "ties":
        row = row.round()
    elif kind == "spike":
        row[17] = 14.0
    elif kind == "impossible":
        row[::3] = -torch.inf
    return row


def _close_to_a_border(kept: Tensor, expected: Tensor, logits: Tensor) -> bool:
    """Whether two sets of tokens differ only by logits that are as good as the same."""
    differing = logits[kept != expected].double()
    borders = [logits[expected].double().min(), logits[expected].double().max()]
    return all(min(abs(float(value - border)) for border in borders) < 1e-4 for value in differing)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_float64_keeps(kind: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    rules: list[tuple[str, float]] = [
        ("typical_p", 0.3), ("typical_p", 0.95), ("epsilon", 3e-4), ("eta", 6e-4), ("top_a", 0.4), ("p_less", 1.0),
        ("xtc_probability", 1.0),
    ]  # fmt: skip
    row = _row(kind, generator)
    bent = (row - row.max()).repeat(len(rules), 1).to(device)
    neutral = {"typical_p": 1.0, "xtc_threshold": THRESHOLD}
    neutral["limits"] = math.inf
    columns = {name: torch.full((len(rules),), neutral.get(name, 0.0), device=device) for name in Cuts._fields}
    for number, (name, value) in enumerate(rules):
        columns[name][number] = value
    floors = torch.full((len(rules),), -torch.inf, device=device)
    words = torch.zeros(len(rules), dtype=torch.int64, device=device)
    narrow(bent, torch.ones(len(rules), device=device), Cuts(**columns), KeyWords(words, words, words, words), floors)
    for number, (name, value) in enumerate(rules):
        expected = TRUTHS[name](row.double()[None], torch.tensor([value], dtype=torch.float64))[0] > -torch.inf
        kept = ((bent[number] >= floors[number]) & (bent[number] > -torch.inf)).cpu()
        assert kept.any()
        assert _close_to_a_border(kept, expected, row), (name, value)


def test_a_dynamic_temperature_is_that_of_the_formula(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.stack([_row(kind, generator) for kind in KINDS])
    temperatures = torch.linspace(0.5, 1.5, len(KINDS))
    reach, exponent = 0.8 * temperatures, torch.linspace(0.5, 3, len(KINDS))
    expected = shaping.dynamic_temperature(logits.double(), temperatures.double(), reach.double(), exponent.double())
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / expected[:, None]
    scores = BlockScores.empty(len(KINDS), LARGE_VOCAB, device)
    score_blocks(logits.to(device), temperatures.to(device), scores)
    ones = torch.ones(len(KINDS))
    asked = Bends(*(part.to(device) for part in (ones, 0 * ones, reach, exponent, 0.25 * ones)))
    bent, drawn_at = torch.empty_like(logits, device=device), torch.empty(len(KINDS), device=device)
    bend(logits.to(device), temperatures.to(device), scores, asked, bent=bent, bent_temperatures=drawn_at)
    torch.testing.assert_close(bent.cpu().double(), shaping.smooth(scaled, 0.25 * ones.double()), rtol=1e-4, atol=1e-4)
    assert drawn_at.tolist() == [1.0] * len(KINDS)


def test_the_coin_of_xtc_is_the_one_of_torch(device: torch.device) -> None:
    """Seeds of both signs, high children: whose coin falls below its probability loses its likeliest."""
    seeds = [0, 7, -3, 2**63 + 5, 2**40, -(2**62)]
    params = [SamplingParams(xtc_probability=0.5, xtc_threshold=0.2, seed=None) for _ in seeds]
    asked = [
        Demands(each, number=n, seed=seed, longest_output=9)
        for n, (each, seed) in enumerate(zip(params, seeds, strict=True))
    ]
    logits = torch.zeros(len(seeds), 300)
    logits[:, :2] = torch.tensor([9.0, 8.5])
    draws = [Draw(str(number), number, number, 5, (), each, ()) for number, each in enumerate(asked)]
    sampler = KernelSampler(8, 300, device, "processed")
    told = by_kernels(sampler, [logits], draws, device)
    falls = [coin(each.demands.seed, each.child, 5, COIN_LEVEL) < 0.5 for each in draws]
    assert len(set(falls)) == 2
    assert [token == 1 for token, fell in zip(told.token_ids, falls, strict=True) if fell] == [True] * sum(falls)
    assert told.token_ids == Sampler("processed").sample([Source(logits, range(len(seeds)))], draws).token_ids


@pytest.mark.parametrize(
    "extra", [{}, {"typical_p": 0.9, "temperature": 0.8}, {"repetition_penalty": 1.3, "top_k": 20}]
)
def test_siblings_of_a_diverse_set_see_what_those_before_them_took(extra: dict[str, Any], device: torch.device) -> None:
    """Two sets and a row of neither, in no order; without the penalty several siblings would take the same token."""
    pushing = {"strategy": "diverse", "diversity_penalty": 3.0, **extra}
    sets = [demands(0, {"n": 3, **pushing, "logprobs": 2}), demands(1, {"n": 4, **pushing, "temperature": 0.01})]
    asked = [(sets[0], 2), (demands(2, {"top_p": 0.9}), 0), (sets[1], 0), (sets[0], 0), (sets[1], 3), (sets[1], 1)]
    asked += [(sets[0], 1), (sets[1], 2)]
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(8))[[0, 1, 1, 0, 1, 1, 0, 1]]
    draws = [Draw(str(each.number), 0, child, 0, (), each, ()) for each, child in asked]
    expected = Sampler("raw").sample([Source(logits, range(len(asked)))], draws)
    sharp = [token for draw, token in zip(draws, expected.token_ids, strict=True) if draw.request_id == "1"]
    assert len(set(sharp)) > 1
    sampler = KernelSampler(8, 300, device, "raw")
    assert all(sampler.serves(draw.demands.choice) for draw in draws)
    compare(by_kernels(sampler, [logits], draws, device), expected)


def test_what_draws_remember_goes_from_one_to_the_next(device: torch.device) -> None:
    """Codes of an arithmetic set and limits that follow surprise, beside a row that has neither.

    From a draw to the next, not over many: the less likely a token, the larger a draw leaves its code's error.
    """
    spread = demands(0, {"n": 4, "strategy": "arithmetic", "temperature": 0.9, "top_p": 0.95, "logprobs": 2})
    following = demands(1, {"n": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.4, "temperature": 1.2})
    asked = [*((spread, child) for child in range(4)), (demands(2, {"min_p": 0.1}), 0)]
    asked += [(following, child) for child in range(2)]
    sampler, truth = KernelSampler(8, 300, device, "raw"), Sampler("raw")
    generator = torch.Generator().manual_seed(11)
    outputs: list[list[int]] = [[] for _ in asked]
    for turn in range(4 * STEPS):
        if turn % 2 == 0:
            outputs = [[] for _ in asked]
        logits = 3 * torch.randn(len(asked), 300, generator=generator)
        draws = [
            Draw(f"{each.number} {turn // 2}", child, child, turn % 2, (), each, tuple(output))
            for (each, child), output in zip(asked, outputs, strict=True)
        ]
        expected = truth.sample([Source(logits, range(len(asked)))], draws)
        assert all(sampler.serves(draw.demands.choice) for draw in draws)
        compare(by_kernels(sampler, [logits], draws, device), expected)
        for output, token in zip(outputs, expected.token_ids, strict=True):
            output.append(token)


def test_candidates_of_draws_without_replacement_are_ranked_by_their_keys(device: torch.device) -> None:
    """Beside a beam and a plain row; noise follows from the output so far."""
    drawn = demands(0, {"n": 3, "strategy": "without_replacement", "temperature": 0.7, "min_p": 0.001})
    beam = demands(1, {"strategy": "beam_search", "beam_width": 3})
    asked = [(drawn, [4, 9]), (drawn, [4, 8]), (beam, [7]), (demands(2, {}), [1]), (demands(-1, {}), [])]
    asked[-1] = (replace(drawn, seed=-5, number=3), [])
    logits = 2 * torch.randn(len(asked), 300, generator=torch.Generator().manual_seed(12))
    draws = [
        Draw(str(each.number), child, child, len(output), (), each, output)
        for child, (each, output) in enumerate(asked)
    ]
    sampler = KernelSampler(8, 300, device, "raw")
    told = by_kernels(sampler, [logits], draws, device)
    expected = Sampler("raw").sample([Source(logits, range(len(asked)))], draws)
    compare(told, expected)
    for index, expansions in expected.expansions.items():
        assert (expansions.keys is None) == (told.expansions[index].keys is None) == (index == 2)
        if expansions.keys is not None:
            assert told.expansions[index].keys == pytest.approx(expansions.keys, abs=2e-5)


def test_what_would_repeat_the_text_costs_what_torch_says(device: torch.device) -> None:
    """Beside rows with other controls, which have slots too; texts grow, and one row leaves its slot to another."""
    asked = [
        demands(0, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}),
        demands(1, {"dry_multiplier": 2.0, "dry_allowed_length": 1, "top_k": 30}),
        demands(2, {"presence_penalty": 0.5}),
        demands(3, {"no_repeat_ngram_size": 1, "dry_multiplier": 1.0, "typical_p": 0.9}),
    ]
    sampler, truth = KernelSampler(4, 40, device, "raw"), Sampler("raw")
    numbers, generator = random.Random(13), torch.Generator().manual_seed(13)
    outputs = [[numbers.randrange(1, 4) for _ in range(9)] for _ in asked]
    for step in range(2):
        logits = torch.randn(len(asked), 40, generator=generator)
        logits[:, :4] += 4
        draws = [
            Draw(str(n), 0, 0, len(output), (), each, tuple(output))
            for n, (each, output) in enumerate(zip(asked, outputs, strict=True))
        ]
        compare(by_kernels(sampler, [logits], draws, device), truth.sample([Source(logits, range(len(asked)))], draws))
        for output in outputs:
            output.append(numbers.randrange(1, 4))
        asked[step] = demands(4 + step, {"frequency_penalty": 0.5})
