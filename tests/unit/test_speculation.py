"""Drafts change nothing: whatever is guessed, and however often it is right, every request gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import InvalidInputError, Request, SamplingParams
from ramify.device.layers import Batch
from ramify.drive.draft_model import DraftModel
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.drafting.drafter import Wanted
from ramify.engine.drafting.lookup import LookupDrafter
from ramify.engine.drafting.ngrams import Ngrams
from ramify.engine.drafting.pace import ALLOWANCE, FIRST_CREDIT, MOST, Pace, Prices
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.sequence import Sequence
from ramify.outputs import RequestOutput
from tests.fake import FakeDevice, FakeLayers, fake_engine, logits_after
from tests.unit.test_engine import Setting, Tokens, alone, check, engine_for, run_all, tokens_of, worlds

VOCABULARY = 300


class Prophet:
    """Knows what will be drawn, and tells it as often as it is told to; else it errs."""

    cost = 0.0
    foreseen = None

    def __init__(self, truths: dict[str, list[tuple[int, ...]]], acceptance: float, seed: int = 0) -> None:
        self.truths = truths
        self.acceptance = acceptance
        self.chance = random.Random(seed)
        self.forgotten: list[str] = []

    def serves(self, _demands: object) -> bool:
        return True

    def draft(self, wanted: Items[Wanted]) -> list[list[int]]:
        return [self._draft(*each) for each in wanted]

    def _draft(self, sequence: Sequence, _demands: object, most: int) -> list[int]:
        assert sequence.output_token_ids
        truth = self.truths[sequence.request_id][sequence.child]
        ahead = truth[len(sequence.output_token_ids) :][:most]
        drafted = []
        for token in ahead:
            is_right = self.chance.random() < self.acceptance
            drafted.append(token if is_right else (token + 1) % VOCABULARY)
        return drafted

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.seq_id)

    def end(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def reset(self) -> None:
        self.forgotten.clear()


def in_order_of_children(prompt: list[int], params: SamplingParams) -> Tokens:
    """Of each child, what it draws; best_of tells only of its best, and in their order."""
    if params.num_samples > params.n:
        params = replace(params, n=params.num_samples, best_of=None)
    return alone(prompt, params)


def run_with_drafts(world: Setting, data: st.DataObject) -> None:
    truths = {str(n): in_order_of_children(prompt, params) for n, (prompt, params, _) in enumerate(world.requests)}
    acceptance = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), label="acceptance")
    prophet = Prophet(truths, acceptance, data.draw(st.integers(0, 9), label="chance"))
    engine = engine_for(world, drafter=prophet)
    pending = list(enumerate(world.requests))
    finished: dict[str, RequestOutput] = {}
    for _ in range(5_000):
        if not pending and not engine.has_unfinished():
            break
        if pending and (not engine.has_unfinished() or data.draw(st.booleans(), label="arrives")):
            number, (prompt, params, priority) = pending.pop(0)
            speculate = not params.mirostat_tau
            request = Request(str(number), None, prompt, replace(params, speculate=speculate), priority=priority)
            engine.add_request(request)
        for output in engine.step():
            finished[output.request_id] = output
        check(engine)
    for number, (prompt, params, _) in enumerate(world.requests):
        assert tokens_of(finished[str(number)]) == alone(prompt, params)
    stats = engine.stats()
    assert stats["blocks_in_use"] == 0
    assert stats["accepted_tokens"] <= stats["drafted_tokens"]
    if acceptance == 1.0:  # all that was drafted was before an end
        assert stats["accepted_tokens"] == stats["drafted_tokens"]
    if acceptance == 0.0:
        assert stats["accepted_tokens"] == 0


@given(world=worlds(), data=st.data())
@settings(max_examples=10)
def test_every_schedule_with_drafts_gives_what_each_request_would_get_alone(
    world: Setting, data: st.DataObject
) -> None:
    run_with_drafts(world, data)


@pytest.mark.long
@given(world=worlds(), data=st.data())
@settings(max_examples=400)
def test_many_schedules_with_drafts_do(world: Setting, data: st.DataObject) -> None:
    run_with_drafts(world, data)


# -- single facts ----------------------------------------------------------------------------------------------


def speculating(prompt: list[int], params: SamplingParams, acceptance: float = 1.0, **options: Any) -> EngineCore:
    """An engine whose drafts are right so often, and one request."""
    truth = in_order_of_children(prompt, replace(params, output_kind="final_only"))
    engine = fake_engine(num_blocks=512, drafter=Prophet({"r": truth}, acceptance), **options)
    engine.add_request(Request("r", None, prompt, params))
    return engine


def test_right_drafts_save_steps() -> None:
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
    engine = speculating([1, 2, 3], params)
    assert tokens_of(run_all(engine)["r"]) == alone([1, 2, 3], params)
    stats = engine.stats()
    assert stats["steps"] < 20
    assert stats["accepted_tokens"] == stats["drafted_tokens"] == 60 - stats["steps"]
    assert stats["generated_tokens"] == 60


def test_wrong_drafts_are_given_up() -> None:
    """The allowance is two tokens of a hundred: at the costs of these steps, a few drafted tokens."""
    engine = speculating([1, 2, 3], SamplingParams(max_tokens=100, seed=1, ignore_eos=True), acceptance=0.0)
    run_all(engine)
    cost = 0.01 / 1.01
    assert engine.stats()["drafted_tokens"] * cost <= FIRST_CREDIT + ALLOWANCE * 100
    assert engine.stats()["steps"] == 100


@pytest.mark.parametrize("kind", ["delta", "cumulative", "growth"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_step_streams_all_the_tokens_it_gave_at_once(kind: str, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=30, seed=1, ignore_eos=True, output_kind=kind)
    engine = speculating([1, 2, 3], params)
    told: list[list[int]] = [[] for _ in range(n)]
    num_outputs = 0
    while engine.has_unfinished():
        outputs = engine.step()
        assert len(outputs) == 1
        num_outputs += 1
        for grown in (token for step in outputs[0].growth for token in step.tokens):
            told[grown.child].append(grown.token_id)
        for completion in outputs[0].outputs if kind != "growth" else ():
            told[completion.index] = [*(told[completion.index] if kind == "delta" else ()), *completion.token_ids]
    assert [tuple(tokens) for tokens in told] == alone([1, 2, 3], replace(params, output_kind="final_only"))
    assert num_outputs < 20


def test_a_fault_behind_a_wrong_draft_harms_nobody() -> None:
    """What is computed behind a token that is not drawn may be anything."""
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    truth = alone([1, 2, 3], params)
    engine = speculating([1, 2, 3], params, acceptance=0.5)
    engine.device.poison(lambda tokens: tuple(tokens[3:]) != truth[0][: len(tokens) - 3])  # type: ignore[attr-defined]
    assert tokens_of(run_all(engine)["r"]) == truth
    engine = speculating([1, 2, 3], params)
    engine.device.poison(lambda tokens: len(tokens) == 9)  # type: ignore[attr-defined]
    output = run_all(engine)["r"]
    assert output.error is not None
    assert output.outputs[0].token_ids == truth[0][:6]


def test_accepted_tokens_are_found_by_later_prompts() -> None:
    params = SamplingParams(max_tokens=21, seed=1, ignore_eos=True)
    engine = speculating([1, 2, 3], params)
    [output] = tokens_of(run_all(engine)["r"])
    engine.add_request(Request("again", None, [1, 2, 3, *output], SamplingParams(max_tokens=1, speculate=False)))
    assert run_all(engine)["again"].num_cached_tokens == 20  # of 23 computed positions, full blocks of 4


def test_who_does_not_want_drafts_has_none_and_who_cannot_is_told() -> None:
    engine = speculating([1, 2, 3], SamplingParams(max_tokens=20, seed=1, speculate=False, ignore_eos=True))
    run_all(engine)
    assert engine.stats()["drafted_tokens"] == 0
    refused: list[dict[str, Any]] = [{"mirostat_tau": 3.0}, {"logits_processors": [lambda _, logits: logits]}]
    for options in refused:
        with pytest.raises(InvalidInputError, match=f"{next(iter(options))} .* set speculate=False"):
            engine.add_request(Request("x", None, [1], SamplingParams(**options)))
        engine.add_request(Request("x", None, [1], SamplingParams(**options, speculate=False)))
        run_all(engine)


def test_beside_too_many_nobody_is_drafted_for() -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=1, ignore_eos=True)
    truth = alone([1, 2, 3], params)
    for most_rows, is_drafted_for in ((2, False), (3, True)):
        engine = fake_engine(num_blocks=512)
        engine.scheduler.speculation = Speculation(Prophet({"r": truth}, 1.0), row_cost=0.01, most_rows=most_rows)
        engine.add_request(Request("r", None, [1, 2, 3], params))
        assert tokens_of(run_all(engine)["r"]) == truth
        assert (engine.stats()["drafted_tokens"] > 0) == is_drafted_for


def test_drafters_hear_who_has_gone() -> None:
    engine = speculating([1, 2, 3], SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True))
    drafter = engine.scheduler.speculation.drafter  # type: ignore[union-attr]
    engine.step()
    engine.step()
    engine.abort("r")
    assert isinstance(drafter, Prophet)
    assert sorted(drafter.forgotten) == ["r", "r-0", "r-1"]


# -- a model that drafts -----------------------------------------------------------------------------------------


class Alike(FakeLayers):
    """Now and then another model than the one that it drafts for."""

    def _logits(self, seen: list[int]) -> Tensor:
        return logits_after(seen, model=int(sum(seen) % 4 == 0))


def draft_model(
    num_blocks: int = 64, *, role: int = 0, max_num_batched_tokens: int = 64, num_known: int | None = None
) -> DraftModel:
    device = FakeDevice(num_blocks, 4, max_num_seqs=16)
    for lane in device.lanes:
        lane.layers = Alike(device.pools[0], 0)
    return DraftModel(
        device,
        BlockManager(num_blocks, 4, enable_prefix_caching=True),
        cost=0.05,
        role=role,
        vocab_size=VOCABULARY,
        num_known=VOCABULARY if num_known is None else num_known,
        max_model_len=128,
        max_num_batched_tokens=max_num_batched_tokens,
    )


@given(
    world=worlds(),
    num_blocks=st.sampled_from([2, 9, 100]),
    budget=st.sampled_from([1, 5, 64]),
    data=st.data(),
)
@settings(max_examples=8)
def test_every_schedule_with_a_draft_model_does_too(
    world: Setting, num_blocks: int, budget: int, data: st.DataObject
) -> None:
    model = draft_model(num_blocks, max_num_batched_tokens=budget)
    engine = engine_for(world, drafter=model)
    pending = [each for each in enumerate(world.requests) if not each[1][1].mirostat_tau]
    finished: dict[str, RequestOutput] = {}
    while pending or engine.has_unfinished():
        if pending and (not engine.has_unfinished() or data.draw(st.booleans(), label="arrives")):
            number, (prompt, params, priority) = pending.pop(0)
            engine.add_request(Request(str(number), None, prompt, params, priority=priority))
        for output in engine.step():
            finished[output.request_id] = output
        check(engine)
        model._manager.check()
    for name, output in finished.items():
        prompt, params, _ = world.requests[int(name)]
        assert tokens_of(output) == alone(prompt, params)
    assert model._manager.num_in_use == 0


def test_a_draft_model_follows_what_was_drawn() -> None:
    """Every guess of a model that is nearly the same, and the prompt of siblings computed once."""
    params = SamplingParams(n=3, max_tokens=40, seed=5, ignore_eos=True)
    prompt = list(range(1, 18))
    model = draft_model()
    engine = fake_engine(num_blocks=512, drafter=model)
    engine.add_request(Request("r", None, prompt, params))
    assert tokens_of(run_all(engine)["r"]) == alone(prompt, params)
    stats = engine.stats()
    assert 0.5 < stats["accepted_tokens"] / stats["drafted_tokens"] < 1
    assert stats["steps"] < 40
    device = model._step
    assert isinstance(device, FakeDevice)
    of_prompt = [chunk for plan in device.plans for chunk in plan.works[0].chunks if chunk.start < 16]
    assert len(of_prompt) == 1


class Smaller(Alike):
    """Of the same tokenizer, and padded to fewer entries."""

    NUM_KNOWN = 290

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        assert int(batch.token_ids.max()) < self.NUM_KNOWN, "it has no embedding of that token"
        return super().forward(batch, rows)

    def _logits(self, seen: list[int]) -> Tensor:
        return super()._logits(seen).index_fill(0, torch.arange(self.NUM_KNOWN, VOCABULARY), -torch.inf)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([1, 2, 3], {}),
        ([1, 295, 3], {}),
        ([1, 2, 3], {"logit_bias": {295: 8.0}}),
        ([1, 2, 3], {"allowed_token_ids": [4, 5, 299]}),
        ([1, 2, 3], {"stop_token_ids": [291], "min_tokens": 5}),
    ],
)
def test_a_draft_model_is_asked_for_no_token_that_it_does_not_know(prompt: list[int], options: dict[str, Any]) -> None:
    """Models of one tokenizer may be padded to different sizes; such a token broke the step, for every request."""
    model = draft_model(num_known=Smaller.NUM_KNOWN)
    assert isinstance(model._step, FakeDevice)
    for lane in model._step.lanes:
        lane.layers = Smaller(model._step.pools[0], 0)
    engine = fake_engine(num_blocks=512, drafter=model)
    params = [SamplingParams(n=2, max_tokens=40, seed=seed, ignore_eos=True, **options) for seed in (5, 6)]
    for seed, each in enumerate(params):
        engine.add_request(Request(str(seed), None, prompt, each))
    engine.add_request(Request("plain", None, [4, 5], SamplingParams(max_tokens=20, seed=1, ignore_eos=True)))
    finished = run_all(engine)
    for seed, each in enumerate(params):
        assert tokens_of(finished[str(seed)]) == alone(prompt, each)
    assert engine.stats()["accepted_tokens"] > 0, "others are drafted for"


# -- what was written before -----------------------------------------------------------------------------------


@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=1, max_size=3), text=st.lists(st.integers(0, 2))
)
@settings(max_examples=80)
def test_the_longest_match_is_found(texts: list[list[int]], text: list[int]) -> None:
    """Against looking everywhere; where a run of three is met more often than is compared, the latest count."""
    ngrams = Ngrams()
    for each in texts:
        ngrams.add(each, 0)
    lengths = [
        next((size for size in range(min(len(text), end), 2, -1) if text[-size:] == each[end - size : end]), 0)
        for each in texts
        for end in range(len(each))
    ]
    match = ngrams.find(text)
    if match is None:
        assert not any(lengths)
        return
    assert match.length >= 3
    assert text[-match.length :] == list(match.text[match.end - match.length : match.end])
    if sum(1 for length in lengths if length) <= 16:
        assert match.length == min(32, max(lengths))
    assert len(match.following(5)) == 5


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    text = [7, 8, 9, 7, 8, 9, 7, 8]
    ngrams = Ngrams()
    ngrams.add(text, 0)
    match = ngrams.find(text)
    assert match is not None
    assert match.following(7) == [9, 7, 8, 9, 7, 8, 9]


def test_siblings_outputs_count_where_that_is_asked() -> None:
    first, second = (Sequence(f"r-{child}", [50, 51], request_id="r", child=child) for child in range(2))
    demands: Any = None
    for token in (1, 2, 3, 4, 5, 6, 7):
        first.add_token_id(token)
    for token in (1, 2, 3):
        second.add_token_id(token)
    for scope, expected in (("ngram", []), ("suffix", [4, 5])):
        drafter = LookupDrafter(scope)  # type: ignore[arg-type]
        assert drafter.draft([Wanted(first, demands, 4)]) == [[]]
        assert drafter.draft([Wanted(second, demands, 4)]) == [expected]
    drafter.forget(first)
    assert drafter.draft([Wanted(second, demands, 4)]) == [[4, 5]]
    drafter.end("r")
    assert drafter.draft([Wanted(second, demands, 4)]) == [[]]


# -- how many --------------------------------------------------------------------------------------------------


@given(
    cost=st.floats(0.01, 1.5),
    fixed=st.sampled_from([0.0, 0.3]),
    drawn=st.floats(0.2, 1),
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=50)
def test_whatever_is_drawn_drafts_cost_little(
    cost: float, fixed: float, drawn: float, rates: list[float], seed: int
) -> None:
    """Counted in tokens that could have been drawn in the time: what was spent beyond what was saved."""
    pace, chance, spent, num_drawn, prices = Pace(), random.Random(seed), 0.0, 0, Prices(cost, fixed, drawn)
    for rate in rates:
        for _ in range(100):
            most = pace.length(prices)
            assert 0 <= most <= MOST
            right = next((place for place in range(most) if chance.random() >= rate), most)
            num_drawn += right + 1
            if most:
                pace.note(most, right, prices)
                spent += most * cost + fixed - right * drawn
            else:
                pace.note_plain()
            assert spent <= FIRST_CREDIT + ALLOWANCE * num_drawn + 1e-6


def test_drafts_grow_as_they_are_drawn_and_come_back_after_a_while() -> None:
    pace = Pace()
    lengths = []
    for _ in range(8):
        lengths.append(pace.length(Prices(0.25)))
        pace.note(lengths[-1], lengths[-1], Prices(0.25))
    assert lengths[0] == 2
    assert lengths[-1] >= 6
    while pace.length(Prices(0.25)):
        pace.note(1, 0, Prices(0.25))
    while pace.length(Prices(0.25)) == 0:
        pace.note_plain()
    pace.note(1, 0, Prices(0.25))
    silent = 0
    while not pace.length(Prices(0.25)):
        pace.note_plain()
        silent += 1
    assert 5 < silent < 60
