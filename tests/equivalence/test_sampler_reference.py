"""The sampler against a slow reference: what it keeps, how likely it makes it, and how often it really draws it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify import FinishReason, SamplingParams
from ramify.cpu.instructions import NATIVE
from ramify.cpu.sampler_operators import CpuOperators
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw, TokenReport
from ramify.sampling import filters, pipeline
from ramify.sampling.filters import Filters
from ramify.sampling.operators import Operators
from ramify.sampling.piece import NOTHING_LEFT
from ramify.sampling.pipeline import Sampler, Source
from tests.drive import finish
from tests.fake import fake_engine
from tests.native import library_for, needs_compiler
from tests.reference_sampler import NEVER, ReferenceRow, reference_filters, reference_row

# 300 and 1,000 are more than the 256 values that filters look at first; 49,152 is the default model's vocabulary.
ROWS_OF_VOCABULARY = {40: 120, 300: 460, 1_000: 400, 49_152: 20}
BATCH = 20  # more than the sampler takes at once, and no multiple of that


@dataclass(frozen=True)
class Case:
    """One row, all that decides what may be drawn from it, and its parameters."""

    logits: list[float]
    params: SamplingParams
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    end_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def reference(self) -> ReferenceRow:
        return reference_row(
            self.logits,
            self.params,
            prompt=self.prompt,
            output=self.output,
            end_token_ids=self.end_token_ids,
            bad_words=self.bad_words,
        )

    def draw(self, number: int = 0, *, child: int = 0, position: int | None = None, seed: int = 1) -> Draw:
        index = len(self.output) if position is None else position
        return Draw(f"request-{number}", child, child, index, (), self.demands(seed), self.output)

    def demands(self, seed: int) -> Demands:
        return Demands(
            self.params,
            seed=seed,
            eos_token_ids=self.end_token_ids,
            bad_words=self.bad_words,
            prompts=(self.prompt,),
        )


# -- random rows -----------------------------------------------------------------------------------------------


def float32(value: float) -> float:
    """Parameters are given as float32 holds them: what is compared is the arithmetic, not the rounding of 0.7."""
    return float(np.float32(value))


def random_logits(numbers: random.Random, size: int) -> list[float]:
    kind = numbers.choice(["smooth", "smooth", "peaked", "ties", "holes", "extreme", "equal", "few"])
    values = torch.randn(size, generator=torch.Generator().manual_seed(numbers.getrandbits(32)))
    if kind == "smooth":
        values *= numbers.uniform(1, 4)
    elif kind == "peaked":
        values *= 12
    elif kind == "ties":
        values = (values * 3).round()
    elif kind == "holes":
        values = torch.where(values < numbers.uniform(-1, 1.5), NEVER, values * 3)
    elif kind == "extreme":
        values = values * 3
        values[numbers.randrange(size)] = numbers.choice([60.0, 1e4])
        values[numbers.randrange(size)] = numbers.choice([-60.0, -1e30])
    elif kind == "equal":
        values = torch.full((size,), numbers.uniform(-3, 3))
    else:
        values = torch.where(torch.arange(size) % 97 == 5, values * 3, NEVER)
    if values.amax() == NEVER:
        values[numbers.randrange(size)] = 1.0
    return [float(value) for value in values.tolist()]


def random_filters(numbers: random.Random, size: int, largest_k: int | None = None) -> dict[str, Any]:
    counts = [-1, -1, 0, 1, 2, 7, 40, 255, 256, 257, size - 1, size, size + 5]
    return {
        "top_k": numbers.choice([count for count in counts if largest_k is None or count <= largest_k]),
        "top_p": float32(numbers.choice([1.0, 1.0, 0.95, 0.5, 0.999, 1e-6, numbers.uniform(0.01, 0.999)])),
        "min_p": float32(numbers.choice([0.0, 0.0, 0.05, 0.5, 1.0, 1e-8, numbers.uniform(0, 0.4)])),
    }


def halve(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
    return logits * 0.5


def forbid_what_was_written(token_ids: Sequence[int], logits: Tensor) -> Tensor:
    logits[list(token_ids)] = NEVER
    return logits


def random_case(numbers: random.Random, size: int) -> Case:
    pool = [numbers.randrange(size) for _ in range(15)]  # few tokens, so that several controls meet in one

    def some_tokens(most: int) -> list[int]:
        return [numbers.choice(pool) for _ in range(numbers.randint(0, most))]

    def sometimes(make: Callable[[], Any], otherwise: Any) -> Any:
        return make() if numbers.random() < 0.4 else otherwise

    output = some_tokens(12)
    words = [(*some_tokens(2), numbers.choice(pool)) for _ in range(3)]
    words += [(*output[len(output) - count :], numbers.choice(pool)) for count in range(min(3, len(output)))]
    params = SamplingParams(
        temperature=float32(numbers.choice([0.0, 1.0, 1.0, 0.3, 0.7, 1.7, 30.0, 0.01])),
        **random_filters(numbers, size),
        presence_penalty=sometimes(lambda: float32(numbers.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(lambda: float32(numbers.uniform(-2, 2)), 0.0),
        repetition_penalty=sometimes(lambda: float32(numbers.uniform(0.5, 2)), 1.0),
        min_tokens=sometimes(lambda: numbers.randint(1, 12), 0),
        max_tokens=None,
        logit_bias=sometimes(
            lambda: {token: float32(numbers.choice([-100, -3.5, 0.1, 4])) for token in some_tokens(5)}, None
        ),
        allowed_token_ids=sometimes(lambda: [*some_tokens(30), 1], None),
        logits_processors=sometimes(lambda: numbers.sample([halve, forbid_what_was_written], 1), None),
        logprobs=size,  # the whole distribution, as it was drawn from
    )
    return Case(
        random_logits(numbers, size),
        params,
        prompt=some_tokens(20),
        output=output,
        end_token_ids=frozenset(sometimes(lambda: some_tokens(3), ())),
        bad_words=sometimes(lambda: tuple(words), ()),
    )


def batches(seed: int) -> Iterator[tuple[int, list[Case]]]:
    numbers = random.Random(seed)
    for size, count in ROWS_OF_VOCABULARY.items():
        for _ in range(count // BATCH):
            yield size, [random_case(numbers, size) for _ in range(BATCH)]


def distribution(report: TokenReport, size: int) -> list[float]:
    """A report about every token, as one logprob per token id."""
    row = np.full(size, NEVER)
    row[report.top_token_ids] = report.top_logprobs
    return [float(value) for value in row.tolist()]


def assert_same_probabilities(logprobs: Sequence[float], expected: ReferenceRow, what: object) -> None:
    for token_id in expected.kept:
        ours, theirs = logprobs[token_id], math.log(max(expected.probabilities[token_id], 1e-300))
        if theirs > -600:  # less is nothing at all in float64 too
            tolerance = 1e-5 + 1e-6 * abs(theirs) + 4 * expected.rounding
            assert abs(ours - theirs) <= tolerance, f"token {token_id}: {ours}, expected {theirs} with {what}"


def kept(logits: Sequence[float]) -> set[int]:
    return {token_id for token_id, value in enumerate(logits) if value > NEVER}


@pytest.fixture(params=["torch", pytest.param("kernels", marks=needs_compiler)])
def operators(request: pytest.FixtureRequest) -> Operators:
    return Operators() if request.param == "torch" else CpuOperators(library_for(NATIVE))


def test_filters_keep_what_the_reference_keeps(
    operators: Operators, record_property: Callable[[str, object], None]
) -> None:
    numbers = random.Random(11)
    rows = undecided = 0
    for size, count in ROWS_OF_VOCABULARY.items():
        for _ in range(count // BATCH):
            logits = [random_logits(numbers, size) for _ in range(BATCH)]
            # One large k makes all rows of a batch be sorted further: most batches have none.
            largest_k = numbers.choice([0, 40, 256, None])
            asked = [random_filters(numbers, size, largest_k) for _ in range(BATCH)]
            counts = [options["top_k"] if 0 < options["top_k"] < size else size for options in asked]
            chosen = Filters(
                torch.tensor(counts),
                torch.tensor([options["top_p"] for options in asked]),
                torch.tensor([options["min_p"] for options in asked]),
            )
            tensor = torch.tensor(logits)
            before = tensor.clone()
            filtered = filters.apply(tensor, chosen, operators.ranked_floors)
            assert torch.equal(tensor, before), "the logits are not the filters' to change"
            for row, (values, options) in enumerate(zip(logits, asked, strict=True)):
                largest = max(abs(value) for value in values if value > -1e29)
                expected = reference_filters(values, **options, rounding=2.0**-23 * largest)
                rows += 1
                if expected.undecided:
                    undecided += 1
                    continue
                assert kept(filtered[row].tolist()) == expected.kept, options
                logprobs = filtered[row].double().log_softmax(-1).tolist()
                assert_same_probabilities(logprobs, expected, options)
    record_property("undecided", undecided)
    assert rows == 1_000
    assert undecided <= 20


def test_the_whole_pipeline_keeps_what_the_reference_keeps(
    operators: Operators, record_property: Callable[[str, object], None]
) -> None:
    """Every row of a batch has parameters of its own; what was drawn from is reported whole."""
    sampler = Sampler("processed")
    sampler.operators = operators
    rows = undecided = empty = greedy = 0
    for size, cases in batches(5):
        logits = torch.tensor([case.logits for case in cases])
        before = logits.clone()
        result = sampler.sample([Source(logits, range(BATCH))], [case.draw(row) for row, case in enumerate(cases)])
        assert torch.equal(logits, before), "the logits are not the sampler's to change"
        for row, case in enumerate(cases):
            expected = case.reference()
            rows += 1
            if not expected.kept:
                assert result.faults[row] == NOTHING_LEFT
                empty += 1
                continue
            assert row not in result.faults
            if expected.undecided:
                undecided += 1
                continue
            logprobs = distribution(result.reports[row], size)
            assert kept(logprobs) == expected.kept, case.params
            assert_same_probabilities(logprobs, expected, case.params)
            token_id = result.token_ids[row]
            assert token_id in expected.kept
            if case.params.temperature == 0:
                greedy += 1
                assert expected.logits[token_id] >= max(expected.logits) - expected.rounding
    record_property("undecided", undecided)
    assert rows == 1_000
    assert undecided <= 20
    assert greedy > 50
    assert 0 < empty < 150


@pytest.mark.parametrize("size", [300, 1_000])
def test_a_row_meets_the_same_fate_whatever_stands_beside_it(size: int, operators: Operators) -> None:
    """Settings are kept as tensors while rows stay the same: a wrong memory would show when they move."""
    numbers = random.Random(size)
    cases = [random_case(numbers, size) for _ in range(BATCH)]
    draws = [case.draw(row, seed=row) for row, case in enumerate(cases)]
    logits = torch.tensor([case.logits for case in cases])
    sampler = Sampler("processed")
    sampler.operators = operators
    together = sampler.sample([Source(logits, range(BATCH))], draws)
    for _ in range(4):
        order = numbers.sample(range(BATCH), numbers.randint(1, BATCH))
        some = sampler.sample([Source(logits, order)], [draws[row] for row in order])
        for place, row in enumerate(order):
            assert (place in some.faults) == (row in together.faults)
            if row not in together.faults:
                assert some.token_ids[place] == together.token_ids[row]
                assert some.logprobs[place] == together.logprobs[row]
                ours, theirs = some.reports[place], together.reports[row]
                assert distribution(ours, size) == distribution(theirs, size), "to the last bit"


def test_a_row_keeps_its_bits_beside_rows_of_another_temperature() -> None:
    """All rows were shifted by their maximum as soon as one had a temperature: another rounding, another near-tie."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).tolist()
    plain, scaled = (Case(logits, SamplingParams(temperature=value, logprobs=300)) for value in (1.0, 0.7))
    tensor = torch.tensor([logits])
    alone = Sampler("processed").sample([Source(tensor, [0])], [plain.draw()]).reports[0]
    beside = Sampler("processed").sample([Source(tensor, [0, 0])], [plain.draw(), scaled.draw(1)]).reports[0]
    assert beside.top_logprobs.tolist() == alone.top_logprobs.tolist()


def test_a_filtered_row_keeps_its_bits_beside_one_without_a_floor() -> None:
    """Rows were shifted by their floor only where all had one: two allowed tokens under top-k have none."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).tolist()
    filtered = Case(logits, SamplingParams(top_p=0.9, logprobs=300))
    open_below = Case(logits, SamplingParams(top_k=5, allowed_token_ids=[1, 2], logprobs=300))
    tensor = torch.tensor([logits])
    alone = Sampler("processed").sample([Source(tensor, [0])], [filtered.draw()]).reports[0]
    beside = Sampler("processed").sample([Source(tensor, [0, 0])], [filtered.draw(), open_below.draw(1)]).reports[0]
    assert beside.top_logprobs.tolist() == alone.top_logprobs.tolist()


# -- how often ---------------------------------------------------------------------------------------------------

MIXES = 24
DRAWS = 6_000
ONE_IN_A_MILLION = 4.7534  # standard deviations that a normal variable exceeds once in a million


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds once in a million, by Wilson and Hilferty; for few cells it is a little more careful."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + ONE_IN_A_MILLION * math.sqrt(part)) ** 3)


def mixed_case(number: int) -> Case:
    """Mixes that leave something to chance, with every control and every filter in some of them."""
    numbers = random.Random(1_000 + number)
    while True:
        case = random_case(numbers, numbers.choice([40, 300]))
        expected = case.reference()
        likely = [probability for probability in expected.probabilities if probability * DRAWS >= 5]
        if case.params.temperature and not expected.undecided and len(likely) > 2:
            return case


@pytest.mark.parametrize("number", range(MIXES))
def test_tokens_are_drawn_as_often_as_the_reference_says(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 draws of each mix, all under one seed with children and positions of their own.

    The limit is exceeded by right samplers once in a million tests, so by any of these 24 with odds of 1 in 40,000.
    """
    monkeypatch.setattr(pipeline, "ROWS_AT_ONCE", 256)  # rows are short here: fewer pieces, the same arithmetic
    case = mixed_case(number)
    expected = case.reference()
    demands = replace(case.demands(number), params=replace(case.params, logprobs=None))
    draws = [
        Draw("r", child, child, position, (), demands, case.output)
        for child in range(100)
        # What a control sees of the position is only whether min_tokens are reached; the noise sees all of it.
        for position in positions_like(len(case.output), case.params.min_tokens, DRAWS // 100)
    ]
    result = Sampler().sample([Source(torch.tensor([case.logits]), [0] * len(draws))], draws)
    counted = np.bincount(result.token_ids, minlength=len(case.logits))
    assert not result.faults
    assert set(np.flatnonzero(counted).tolist()) <= expected.kept
    cells = [(count, probability * DRAWS) for count, probability in zip(counted, expected.probabilities, strict=True)]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = (sum(count for count, mean in cells if mean < 5), sum(mean for _, mean in cells if mean < 5))
    if rest[1] >= 5:
        large.append(rest)
    statistic = sum((count - mean) ** 2 / mean for count, mean in large)
    assert statistic < chi_square_limit(len(large) - 1), case.params


def positions_like(position: int, min_tokens: int, count: int) -> range:
    """As many positions as asked for, on the same side of min_tokens as this one."""
    return range(min_tokens, min_tokens + count) if position >= min_tokens else range(count)


# -- each control alone, by hand -----------------------------------------------------------------------------------

FIVE = [2.0, 1.0, 0.0, -1.0, -2.0]


def drawn_from(
    logits: Sequence[float],
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_token_ids: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    **options: Any,
) -> list[float]:
    """The probabilities that the sampler says it has drawn from."""
    params = SamplingParams(logprobs=len(logits), max_tokens=None, **options)
    case = Case(list(logits), params, list(prompt), list(output), frozenset(end_token_ids), tuple(bad_words))
    result = Sampler("processed").sample([Source(torch.tensor([case.logits]), [0])], [case.draw()])
    assert not result.faults, result.faults
    return [math.exp(value) for value in distribution(result.reports[0], len(logits))]


def softmax(*logits: float) -> Any:
    weights = [math.exp(value) for value in logits]
    return pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)


def test_nothing_asked_is_the_model_itself() -> None:
    assert drawn_from(FIVE, prompt=[0, 1], output=[2, 2], end_token_ids=[3], bad_words=[]) == softmax(*FIVE)


def test_temperature_divides() -> None:
    assert drawn_from(FIVE, temperature=0.5) == softmax(4, 2, 0, -2, -4)
    assert drawn_from(FIVE, temperature=2.0) == softmax(1, 0.5, 0, -0.5, -1)


def test_greedy_rows_skip_temperature_and_filters() -> None:
    assert drawn_from(FIVE, temperature=0, top_k=1, top_p=0.1, min_p=0.9) == softmax(*FIVE)


def test_min_tokens_ban_every_end_until_they_are_reached() -> None:
    banned = softmax(NEVER, 1, 0, -1, NEVER)
    assert drawn_from(FIVE, min_tokens=2, end_token_ids=[0, 4]) == banned
    assert drawn_from(FIVE, min_tokens=2, end_token_ids=[0, 4], output=[1]) == banned
    assert drawn_from(FIVE, min_tokens=2, end_token_ids=[0, 4], output=[1, 1]) == softmax(*FIVE)


def test_allowed_ids_leave_nothing_else() -> None:
    assert drawn_from(FIVE, allowed_token_ids=[1, 3, 3]) == softmax(NEVER, 1, NEVER, -1, NEVER)


def test_allowing_an_end_does_not_lift_its_ban() -> None:
    probabilities = drawn_from(FIVE, allowed_token_ids=[0, 3], min_tokens=1, end_token_ids=[0])
    assert probabilities == softmax(NEVER, NEVER, NEVER, -1, NEVER)


def test_a_bad_word_of_one_token_is_banned_everywhere() -> None:
    for output in ([], [1], [0, 0]):
        assert drawn_from(FIVE, bad_words=[(0,)], output=output) == softmax(NEVER, 1, 0, -1, -2)


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([1, 2], True),
        ([4, 1, 2], True),
        ([1, 2, 1, 2], True),
        ([2], False),  # its end alone is not its beginning
        ([1, 2, 4], False),  # long gone
        ([2, 1], False),
        ([], False),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_where_the_others_have_just_been_written(
    output: list[int], banned: bool
) -> None:
    expected = softmax(NEVER, 1, 0, -1, -2) if banned else softmax(*FIVE)
    assert drawn_from(FIVE, bad_words=[(1, 2, 0)], output=output) == expected


def test_a_bad_word_begun_in_the_prompt_is_not_begun() -> None:
    assert drawn_from(FIVE, bad_words=[(1, 2, 0)], prompt=[1, 2]) == softmax(*FIVE)
    assert drawn_from(FIVE, bad_words=[(1, 2, 0)], prompt=[1], output=[2]) == softmax(*FIVE)


def test_bias_is_added_and_lifts_no_ban() -> None:
    assert drawn_from(FIVE, logit_bias={4: 3.0, 0: -1.5}) == softmax(0.5, 1, 0, -1, 1)
    biased = drawn_from(FIVE, logit_bias={0: 50.0}, bad_words=[(0,)])
    assert biased == softmax(NEVER, 1, 0, -1, -2)


def test_a_repetition_penalty_sees_prompt_and_output_and_counts_nothing_twice() -> None:
    probabilities = drawn_from(FIVE, repetition_penalty=2.0, prompt=[0, 0, 2], output=[3, 0])
    assert probabilities == softmax(1, 1, 0, -2, -2)
    assert drawn_from(FIVE, repetition_penalty=0.5, prompt=[0], output=[4]) == softmax(4, 1, 0, -1, -1)


def test_frequency_counts_and_presence_does_not() -> None:
    assert drawn_from(FIVE, frequency_penalty=0.5, output=[0, 0, 3]) == softmax(1, 1, 0, -1.5, -2)
    assert drawn_from(FIVE, presence_penalty=0.5, output=[0, 0, 3]) == softmax(1.5, 1, 0, -1.5, -2)
    both = drawn_from(FIVE, frequency_penalty=0.5, presence_penalty=-0.25, output=[0, 0, 3])
    assert both == softmax(1.25, 1, 0, -1.25, -2)


def test_frequency_and_presence_know_nothing_of_the_prompt() -> None:
    assert drawn_from(FIVE, frequency_penalty=2, presence_penalty=2, prompt=[0, 1, 2]) == softmax(*FIVE)


def test_bias_comes_before_penalties_and_repetition_before_frequency() -> None:
    """(1 + 3) / 2 - 0.5; the other orders give 3.0, 3.5 or 1.75."""
    probabilities = drawn_from(FIVE, logit_bias={1: 3.0}, repetition_penalty=2.0, frequency_penalty=0.5, output=[1])
    assert probabilities == softmax(2, 1.5, 0, -1, -2)


def test_processors_see_penalised_logits_before_the_temperature() -> None:
    seen: list[list[float]] = []

    def double(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(logits.tolist())
        return logits * 2

    probabilities = drawn_from(FIVE, presence_penalty=1.0, output=[0], temperature=0.5, logits_processors=[double])
    assert seen == [[1.0, 1.0, 0.0, -1.0, -2.0]]
    assert probabilities == softmax(4, 4, 0, -4, -8)


def test_top_p_is_measured_on_what_top_k_left() -> None:
    """Of 0.4, 0.3, 0.2 and 0.1, top-k leaves 4/7 and 3/7: the first alone reaches 0.5, and of the whole it does not."""
    logits = [math.log(value) for value in (0.4, 0.3, 0.2, 0.1)]
    assert drawn_from(logits, top_k=2, top_p=0.5) == softmax(0, NEVER, NEVER, NEVER)
    assert drawn_from(logits, top_p=0.5) == softmax(logits[0], logits[1], NEVER, NEVER)


def test_ties_at_every_border_stay() -> None:
    logits = [1.0, 0.0, 0.0, 0.0, -5.0]
    expected = softmax(1, 0, 0, 0, NEVER)
    assert drawn_from(logits, top_k=2) == expected
    assert drawn_from(logits, top_p=0.6) == expected
    assert drawn_from(logits, min_p=math.exp(-1) * 0.999) == expected
    assert drawn_from(logits, top_k=2, top_p=0.9) == expected, "top-p measures all that top-k left"


def test_ties_beyond_the_first_256_have_mass_too() -> None:
    """999 tokens tie at the border of top-k and all stay: the likeliest has 2 % of what is left and not 7 %."""
    logits = [3.0, *[0.0] * 999]
    assert drawn_from(logits, top_k=5, top_p=0.05) == softmax(*logits)
    assert drawn_from(logits, top_k=5, top_p=0.015) == softmax(3, *[NEVER] * 999)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30, 1e39, 1e300])
def test_no_temperature_lifts_a_ban(temperature: float) -> None:
    """Beyond 3e38 a temperature was infinite in float32, and a banned token divided by it drawn as NaN."""
    probabilities = drawn_from(FIVE, temperature=temperature, allowed_token_ids=[1, 3])
    expected = softmax(NEVER, 0, NEVER, NEVER if temperature < 1 else 0, NEVER)
    assert probabilities == expected


def test_no_finite_bias_or_penalty_is_too_large() -> None:
    """In float32 they were infinite or 0, and infinity minus itself, or 0 times infinity, is NaN."""
    assert drawn_from(FIVE, logit_bias={1: 1e300}, top_p=0.9) == softmax(NEVER, 0, NEVER, NEVER, NEVER)
    assert drawn_from(FIVE, logit_bias={1: 1e300}, temperature=0.5) == softmax(NEVER, 0, NEVER, NEVER, NEVER)
    assert drawn_from(FIVE, logit_bias={1: -1e300}, temperature=0.5) == softmax(4, NEVER, 0, -2, -4)
    assert drawn_from(FIVE, repetition_penalty=1e300, prompt=[1, 2, 3]) == softmax(2, 0, 0, NEVER, -2)
    assert drawn_from(FIVE, repetition_penalty=1e-300, prompt=[1, 2]) == softmax(NEVER, 0, NEVER, NEVER, NEVER)


@pytest.mark.parametrize(
    "filtered", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_filters_meet_a_row_with_nothing_left(filtered: dict[str, Any], temperature: float) -> None:
    """top-k and top-p together looked for the border in such a row, and broke the step for everybody."""
    logits = [float(place % 17) for place in range(300)]
    params = SamplingParams(temperature=temperature, allowed_token_ids=[0], min_tokens=1, **filtered)
    cases = [Case(logits, params, end_token_ids=frozenset([0])), Case(logits, SamplingParams(top_p=0.9))]
    draws = [case.draw(row) for row, case in enumerate(cases)]
    result = Sampler().sample([Source(torch.tensor([logits]), [0, 0])], draws)
    assert result.faults == {0: NOTHING_LEFT}


def test_a_row_with_nothing_left_to_draw_ends_its_request_alone() -> None:
    """The only token allowed is the end, and it may not come yet."""
    impossible: dict[str, Any] = {"allowed_token_ids": [0], "min_tokens": 1}
    params = [
        SamplingParams(max_tokens=5, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=5, seed=2, **impossible),
        SamplingParams(max_tokens=5, seed=3, n=2, top_p=0.8),
        SamplingParams(max_tokens=5, temperature=0, **impossible),
    ]
    outputs = finish(fake_engine(), [([7, 8, 9], each) for each in params])
    for index in (1, 3):
        assert outputs[index].error == NOTHING_LEFT
        assert "allowed_token_ids" in NOTHING_LEFT
        assert [completion.finish_reason for completion in outputs[index].outputs] == [FinishReason.ERROR]
    for index in (0, 2):
        alone = finish(fake_engine(), [([7, 8, 9], params[index])])[0]
        assert outputs[index].error is None
        assert [completion.token_ids for completion in outputs[index].outputs] == [
            completion.token_ids for completion in alone.outputs
        ]
