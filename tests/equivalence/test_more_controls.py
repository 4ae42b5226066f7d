"""Rules beyond top-k, top-p and min-p: against float64 on random rows, against `transformers`, and by counting draws.

The reference below is written from the formulas in docs/sampling.md and shares no line with ramify/sampling.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify import SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.sampling import pipeline, truncation
from ramify.sampling.draw import COIN_LEVEL, coin
from ramify.sampling.lookback import longest_repeats
from ramify.sampling.pipeline import Sampler, Source
from tests.equivalence.test_sampler_reference import chi_square_limit, float32, random_logits

Row = NDArray[np.float64]
CLOSE = 2e-5  # nearer to a border than this, float32 may fall on the other side
ROWS, BATCH = 1_000, 20


class Reference:
    """One row in float64."""

    def __init__(self, logits: list[float], params: SamplingParams, seen: list[int], breakers: set[int]) -> None:
        self.row = np.array(logits, np.float64)
        self.params, self.seen, self.breakers = params, seen, breakers
        self.undecided = False

    def controls(self) -> None:
        size = self.params.no_repeat_ngram_size
        if size:
            for start in range(len(self.seen) - size + 1):
                *beginning, last = self.seen[start : start + size]
                if beginning == self.seen[len(self.seen) - size + 1 :]:
                    self.row[last] = -np.inf
        if self.params.dry_multiplier:
            for token, cost in self.costs().items():
                self.row[token] -= cost

    def costs(self) -> dict[int, float]:
        params = self.params
        seen = self.seen if params.dry_penalty_last_n < 0 else self.seen[::-1][: params.dry_penalty_last_n][::-1]
        costs: dict[int, float] = {}
        for token in set(seen) - self.breakers:
            longest = 0
            for place, follower in enumerate(seen):
                if follower != token:
                    continue
                length = 0
                while length < place and seen[place - 1 - length] == seen[-1 - length] not in self.breakers:
                    length += 1
                longest = max(longest, length)
            if longest >= params.dry_allowed_length:
                costs[token] = params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length)
        return costs

    @property
    def logprobs(self) -> Row:
        below: Row = self.row - self.row.max()
        logprobs: Row = below - np.log(np.exp(below).sum())
        return logprobs

    @property
    def entropy(self) -> float:
        likely = self.logprobs[self.row > -np.inf]
        return float(-(np.exp(likely) * likely).sum())

    def keep(self, values: Row, border: float) -> None:
        """Those whose value is at least the border, and the likeliest."""
        finite = values[self.row > -np.inf]
        scale = 1 + abs(border)
        self.undecided |= bool(((np.abs(finite - border) < CLOSE * scale) & (finite != border)).any())
        self.row = np.where((values >= border) | (self.row == self.row.max()), self.row, -np.inf)

    def filters(self, *, excludes: bool) -> None:
        params = self.params
        if params.temperature == 0:
            return
        if params.top_n_sigma:
            deviation = self.row[self.row > -np.inf].std()
            self.keep(self.row, self.row.max() - params.top_n_sigma * deviation)
        temperature = params.temperature
        if params.dynatemp_range:
            count = max(2, int((self.row > -np.inf).sum()))
            share = max(0.0, self.entropy / np.log(count)) ** params.dynatemp_exponent
            low, high = temperature - params.dynatemp_range, temperature + params.dynatemp_range
            temperature = max(low + (high - low) * share, 1e-38)
        self.row = (self.row - self.row.max()) / temperature
        if params.smoothing_factor:
            self.row = self.row.max() - params.smoothing_factor * (self.row.max() - self.row) ** 2
        if 0 < params.top_k < len(self.row):
            self.keep(self.row, float(np.sort(self.row)[-params.top_k]))
        if params.min_p:
            self.keep(self.logprobs, float(self.logprobs.max() + np.log(params.min_p)))
        if params.typical_p < 1:
            self.typical()
        if params.epsilon_cutoff:
            self.keep(self.logprobs, np.log(params.epsilon_cutoff))
        if params.eta_cutoff:
            eta = params.eta_cutoff
            self.keep(self.logprobs, np.log(min(eta, np.sqrt(eta) * np.exp(-self.entropy))))
        if params.top_a:
            self.keep(self.logprobs, np.log(params.top_a) + 2 * self.logprobs.max())
        if params.p_less:
            self.keep(self.logprobs, np.log((np.exp(self.logprobs) ** 2).sum()))
        if excludes:
            border = np.log(params.xtc_threshold) if params.xtc_threshold else -np.inf
            finite = self.logprobs[self.row > -np.inf]
            self.undecided |= bool((np.abs(finite - border) < CLOSE * (1 + abs(border))).any())
            reaching = finite[finite >= border]
            if len(reaching):
                gone = self.logprobs > reaching.min()
                near = np.abs(self.logprobs - reaching.min()) < CLOSE * (1 + abs(reaching.min()))
                self.undecided |= bool((near & (self.logprobs != reaching.min())).any())
                self.row = np.where(gone, -np.inf, self.row)

    def typical(self) -> None:
        logprobs = self.logprobs
        distance = np.where(self.row > -np.inf, np.abs(-logprobs - self.entropy), np.inf)
        order = np.argsort(distance, kind="stable")
        reached = np.exp(logprobs[order]).cumsum()
        self.undecided |= bool((np.abs(reached - self.params.typical_p) < CLOSE).any())
        last = min(int((reached < self.params.typical_p).sum()), len(order) - 1)
        border = distance[order[last]]
        near = np.abs(distance - border) < CLOSE * (1 + border)
        self.undecided |= bool((near & (distance != border)).any())
        self.row = np.where(distance <= border, self.row, -np.inf)


RULES: dict[str, Any] = {
    "top_n_sigma": lambda numbers: numbers.choice([0.3, 1.0, 2.5]),
    "typical_p": lambda numbers: numbers.choice([0.2, 0.5, 0.95]),
    "epsilon_cutoff": lambda numbers: numbers.choice([3e-4, 0.01, 0.5]),
    "eta_cutoff": lambda numbers: numbers.choice([3e-4, 0.01, 0.9]),
    "top_a": lambda numbers: numbers.choice([0.01, 0.2, 1.0]),
    "p_less": lambda _: True,
    "smoothing_factor": lambda numbers: numbers.choice([0.05, 0.4, 2.0]),
    "dynatemp_range": lambda numbers: numbers.choice([0.1, 0.3]),
    "xtc_probability": lambda numbers: numbers.choice([0.5, 1.0]),
    "no_repeat_ngram_size": lambda numbers: numbers.choice([1, 2, 3]),
    "dry_multiplier": lambda numbers: numbers.choice([0.4, 3.0]),
    "top_k": lambda numbers: numbers.choice([3, 20]),
    "min_p": lambda numbers: numbers.choice([0.01, 0.2]),
}


def random_params(numbers: random.Random, *names: str) -> dict[str, Any]:
    asked = {name: RULES[name](numbers) for name in names or numbers.sample(sorted(RULES), numbers.randint(1, 3))}
    if "xtc_probability" in asked:
        asked["xtc_threshold"] = numbers.choice([0.02, 0.1, 0.3])
    if "dry_multiplier" in asked:
        asked |= {"dry_base": numbers.choice([1.0, 1.75]), "dry_allowed_length": numbers.choice([1, 2])}
        asked["dry_penalty_last_n"] = numbers.choice([-1, 0, 5, 12])
    if "dynatemp_range" in asked:
        asked["dynatemp_exponent"] = numbers.choice([0.5, 1.0, 2.0])
    asked["temperature"] = numbers.choice([0.7, 1.0, 1.0, 1.3] if names else [0.0, 0.7, 1.0, 1.0, 1.3])
    if "dynatemp_range" in asked:
        asked["temperature"] = max(asked["temperature"], 0.7)
    return {name: float32(value) if type(value) is float else value for name, value in asked.items()}


class Case:
    def __init__(self, numbers: random.Random, size: int, *names: str) -> None:
        self.logits = random_logits(numbers, size)
        self.params = SamplingParams(**random_params(numbers, *names), logprobs=size, max_tokens=None)
        pool = [numbers.randrange(size) for _ in range(4)]
        self.prompt = [numbers.choice(pool) for _ in range(numbers.randint(0, 25))]
        self.output = [numbers.choice(pool) for _ in range(numbers.randint(0, 12))]
        self.breakers = frozenset(numbers.sample(pool, 1)) if numbers.random() < 0.5 else frozenset()
        self.seed = numbers.getrandbits(40)

    def draw(self, number: int = 0) -> Draw:
        demands = Demands(self.params, seed=self.seed, prompts=(self.prompt,), breakers=self.breakers)
        return Draw(f"request-{number}", 0, 0, len(self.output), (), demands, self.output)

    def excludes(self) -> bool:
        return coin(self.seed, 0, len(self.output), COIN_LEVEL) < self.params.xtc_probability

    def reference(self, *, excludes: bool) -> Reference:
        made = Reference(self.logits, self.params, [*self.prompt, *self.output], set(self.breakers))
        made.controls()
        if made.row.max() > -np.inf:
            made.filters(excludes=excludes)
        return made


def drawn_from(sampler: Sampler, cases: list[Case], size: int) -> list[Row | None]:
    """The logprobs that the sampler says it has drawn from; None where nothing is left."""
    logits = torch.tensor([case.logits for case in cases])
    draws = [case.draw(number) for number, case in enumerate(cases)]
    result = sampler.sample([Source(logits, range(len(cases)))], draws)
    rows: list[Row | None] = []
    for number in range(len(cases)):
        row = np.full(size, -np.inf)
        report = result.reports[number]
        row[report.top_token_ids] = report.top_logprobs
        rows.append(None if number in result.faults else row)
    return rows


def test_every_rule_equals_a_slow_reference() -> None:
    numbers = random.Random(3)
    sampler = Sampler("processed")
    decided = 0
    for _ in range(ROWS // BATCH):
        size = numbers.choice([40, 300, 1_000])
        cases = [Case(numbers, size) for _ in range(BATCH)]
        for case, ours in zip(cases, drawn_from(sampler, cases, size), strict=True):
            expected = case.reference(excludes=case.excludes())
            if expected.row.max() == -np.inf:
                assert ours is None, case.params
                continue
            if expected.undecided or max(abs(value) for value in case.logits if value > -1e29) > 1e3:
                continue  # 1e4 has three digits behind the point in float32
            decided += 1
            assert ours is not None
            theirs = expected.logprobs
            assert ((ours > -np.inf) == (theirs > -np.inf)).all(), case.params
            likely = theirs > -30
            assert np.abs(ours[likely] - theirs[likely]).max() < 1e-3, case.params
    assert decided > 0.75 * ROWS


@pytest.mark.parametrize("name", sorted(set(RULES) - {"top_k", "min_p"}))
def test_tokens_are_drawn_as_often_as_each_rule_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 draws; right samplers exceed the limit once in a million tests. Coins fall anew for each."""
    monkeypatch.setattr(pipeline, "ROWS_AT_ONCE", 256)
    numbers = random.Random(f"draws {name}")
    while True:
        case = Case(numbers, 40, name)
        plain, excluding = case.reference(excludes=False), case.reference(excludes=True)
        share = case.params.xtc_probability
        probabilities = np.exp(plain.logprobs) * (1 - share)
        if share:
            probabilities += np.exp(excluding.logprobs) * share
        if not (plain.undecided or excluding.undecided) and (probabilities * 6_000 >= 5).sum() > 2:
            break
    demands = replace(case.draw().demands, params=replace(case.params, logprobs=None))
    draws = [
        Draw("r", child, child, position, (), demands, case.output) for child in range(100) for position in range(60)
    ]
    result = Sampler().sample([Source(torch.tensor([case.logits]), [0] * len(draws))], draws)
    counted = np.bincount(result.token_ids, minlength=40)
    means = probabilities * len(draws)
    assert not counted[means == 0].any()
    large = means >= 5
    cells = [*zip(counted[large], means[large], strict=True)]
    if means[~large].sum() >= 5:
        cells.append((counted[~large].sum(), means[~large].sum()))
    assert sum((count - mean) ** 2 / mean for count, mean in cells) < chi_square_limit(len(cells) - 1), case.params


# -- transformers ------------------------------------------------------------------------------------------------


def _logits() -> Tensor:
    return torch.randn(50, 1_000, generator=torch.Generator().manual_seed(9)) * 3


@pytest.mark.parametrize("value", [0.1, 0.5, 0.9])
def test_typical_is_that_of_transformers(value: float) -> None:
    from transformers.generation.logits_process import TypicalLogitsWarper

    theirs = TypicalLogitsWarper(value)(None, _logits())
    assert torch.equal(truncation.typical_p(_logits(), torch.full((50,), value)), theirs)


@pytest.mark.parametrize("value", [3e-4, 0.01, 0.6])
def test_cutoffs_are_those_of_transformers(value: float) -> None:
    from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper

    asked = torch.full((50,), value)
    assert torch.equal(truncation.epsilon_cutoff(_logits(), asked), EpsilonLogitsWarper(value)(None, _logits()))
    assert torch.equal(truncation.eta_cutoff(_logits(), asked), EtaLogitsWarper(value)(None, _logits()))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_repeated_ngrams_are_those_of_transformers(size: int) -> None:
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    numbers = random.Random(size)
    for length in (1, 2, 8, 40):
        seen = [numbers.randrange(4) for _ in range(length)]
        theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([seen]), torch.zeros(1, 10))
        demands = Demands(SamplingParams(no_repeat_ngram_size=size, logprobs=10), prompts=(seen,))
        result = Sampler("processed").sample([Source(torch.zeros(1, 10), [0])], [Draw("r", 0, 0, 0, (), demands, ())])
        report = result.reports[0]
        left = {
            int(token) for token, value in zip(report.top_token_ids, report.top_logprobs, strict=True) if value > -99
        }
        assert left == set((theirs[0] > -torch.inf).nonzero()[:, 0].tolist())


# -- by hand -----------------------------------------------------------------------------------------------------


def test_a_threshold_that_all_reach_leaves_the_least_likely_that_can_be_drawn() -> None:
    """It left nothing where another rule had left something out before."""
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 0.5]])
    kept = truncation.xtc(logits, torch.zeros(1)) > -torch.inf
    assert kept.tolist() == [[False, False, False, True]]


def test_a_repetition_is_as_long_as_it_goes_back() -> None:
    ids = np.array([5, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    followers, lengths = longest_repeats(ids, frozenset(), 100)
    assert dict(zip(followers.tolist(), lengths.tolist(), strict=True)) == {3: 2, 4: 3}
    followers, lengths = longest_repeats(ids, frozenset({1}), 100)
    assert dict(zip(followers.tolist(), lengths.tolist(), strict=True)) == {3: 1, 4: 1}
    assert longest_repeats(ids, frozenset({2}), 100)[0].tolist() == []
    assert longest_repeats(ids[:0], frozenset(), 100)[0].tolist() == []


def test_greedy_rows_are_controlled_and_not_filtered() -> None:
    """The likeliest of what controls left, whatever filters are asked for beside."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    params = SamplingParams(temperature=0, no_repeat_ngram_size=1, xtc_probability=1.0, top_n_sigma=0.1)
    draw = Draw("r", 0, 0, 1, (), Demands(params, prompts=((2,),)), (0,))
    assert Sampler().sample([Source(logits, [0])], [draw]).token_ids == [1]


def test_a_row_keeps_its_bits_beside_rows_that_ask_for_more() -> None:
    numbers = random.Random(1)
    cases = [Case(numbers, 300) for _ in range(12)]
    together = drawn_from(Sampler("processed"), cases, 300)
    for number, case in enumerate(cases):
        [alone] = drawn_from(Sampler("processed"), [case], 300)
        beside = together[number]
        assert (alone is None) == (beside is None)
        assert alone is None or beside is None or np.array_equal(alone, beside)
