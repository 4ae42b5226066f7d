"""A watched request tells every step of its growth, and grows no differently for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import (
    GrownToken,
    InvalidInputError,
    OutputKind,
    ParentRequest,
    Request,
    RequestOutput,
    SamplingParams,
    Standing,
)
from ramify.config import MixtureConfig
from ramify.drive.merging import merged
from ramify.engine.core import EngineCore
from ramify.sampling.mixing import Mixer
from tests.fake import VOCAB, fake_engine, letters

PROMPT = [5, 6, 7, 8, 9]


def watch(engine: EngineCore, params: SamplingParams) -> list[RequestOutput]:
    """All outputs of one watched request."""
    engine.add_request(Request("watched", None, PROMPT, replace(params, output_kind="growth")))
    seen: list[RequestOutput] = []
    while engine.has_unfinished():
        seen += engine.step()
    assert engine.stats()["blocks_in_use"] == 0
    return seen


def unwatched(engine: EngineCore, params: SamplingParams) -> RequestOutput:
    engine.add_request(Request("unwatched", None, PROMPT, params))
    seen: list[RequestOutput] = []
    while engine.has_unfinished():
        seen += engine.step()
    return seen[-1]


def lettered(engine: EngineCore) -> EngineCore:
    """The same engine with text: few letters, so that stop strings are met, and one that takes two tokens."""
    engine.make_text = letters().make_stream
    return engine


class Replay:
    """Whoever follows the steps knows every child, as the engine does."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[GrownToken, ...]] = {0: ()}
        self.texts: dict[int, str] = {0: ""}
        self.standings: tuple[Standing, ...] = ()

    def take(self, output: RequestOutput) -> None:
        for step in output.growth:
            grown = {token.child: (*self.tokens.get(token.parent, ()), token) for token in step.tokens}
            texts = {token.child: self._text(token) for token in step.tokens}
            self.tokens |= grown
            self.texts |= texts
            self.standings = step.standings or self.standings

    def _text(self, token: GrownToken) -> str:
        before = self.texts.get(token.parent, "")
        return before[: len(before) - token.num_taken_back] + token.text

    def ids(self, child: int) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens[child])


PARAMS: list[dict[str, Any]] = [
    {"n": 1, "seed": 3},
    {"n": 5, "seed": 3},
    {"n": 3, "seed": 3, "temperature": 0.4, "logprobs": 4},
    {"n": 2, "best_of": 6, "seed": 3},
    {"n": 2, "best_of": 6, "seed": 3, "score": "mean_logprob"},
    {"n": 4, "strategy": "diverse", "diversity_penalty": 2.0, "seed": 3},
    {"n": 3, "strategy": "beam_search", "beam_width": 4},
    {"n": 1, "strategy": "beam_search", "beam_width": 3, "early_stopping": True, "logprobs": 2},
    {"n": 4, "strategy": "beam_search", "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 1.5},
]


@given(
    options=st.sampled_from(PARAMS),
    max_tokens=st.integers(1, 12),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=90),
    num_blocks=st.sampled_from([24, 64]),
    runs_ahead=st.booleans(),
    stop=st.sampled_from([None, "abca", "ccbabb", "bcabca"]),
)
@settings(max_examples=60)
def test_the_steps_replayed_are_the_outputs_and_watching_changes_nothing(
    *, options: dict[str, Any], max_tokens: int, ends: set[int], num_blocks: int, runs_ahead: bool, stop: str | None
) -> None:
    beams = options.get("strategy") == "beam_search"
    params = SamplingParams(**options, max_tokens=max_tokens, stop=None if beams else stop)

    def engine() -> EngineCore:
        return lettered(fake_engine(num_blocks=num_blocks, eos_token_ids=frozenset(ends), runs_ahead=runs_ahead))

    seen = watch(engine(), params)
    last = seen[-1]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert all(output.outputs == () for output in seen[:-1]), "the whole comes once, at the end"

    plain = unwatched(engine(), params)
    assert plain.growth == ()
    assert last.outputs == plain.outputs

    replay = Replay()
    for output in seen:
        replay.take(output)
    ranked = beams or params.num_samples > params.n
    children = [standing.child for standing in replay.standings] if ranked else sorted(replay.tokens)
    for output_of, child in zip(last.outputs, children, strict=False):
        assert replay.ids(child) == output_of.token_ids
        assert replay.texts[child] == output_of.text
        final = replay.tokens[child][-1]
        assert (final.finish_reason, final.stop_reason) == (output_of.finish_reason, output_of.stop_reason)
        assert sum(token.logprob for token in replay.tokens[child]) == pytest.approx(output_of.cumulative_logprob)
        if params.logprobs is not None:
            assert output_of.logprobs is not None
            assert [token.alternatives for token in replay.tokens[child]] == list(output_of.logprobs)
        else:
            assert all(token.alternatives is None for token in replay.tokens[child])
    if ranked:
        assert [standing.score for standing in replay.standings[: params.n]] == [
            output.score for output in last.outputs
        ]
    if not beams:
        assert len(replay.tokens) == params.num_samples
        assert len(replay.standings) == (params.num_samples if ranked else 0)


def test_a_slow_reader_misses_no_step() -> None:
    params = SamplingParams(strategy="beam_search", n=2, beam_width=3, max_tokens=8)
    seen = watch(fake_engine(), params)
    joined: RequestOutput | None = None
    for output in seen:
        joined = merged(joined, output, OutputKind.GROWTH)
    assert joined is not None
    assert joined.growth == tuple(step for output in seen for step in output.growth)
    assert joined.outputs == seen[-1].outputs
    assert joined.finished


@pytest.mark.parametrize("options", [{"n": 3, "seed": 1}, {"n": 2, "strategy": "beam_search", "beam_width": 3}])
def test_a_token_of_two_models_tells_how_they_were_mixed(options: dict[str, Any]) -> None:
    engine = fake_engine(num_models=2, mixer=Mixer(MixtureConfig()))
    params = SamplingParams(**options, max_tokens=6, output_kind="growth")
    engine.add_request(Request("pair", None, PROMPT, params, other_prompts=[(1, [3, 4])]))
    replay = Replay()
    seen: list[RequestOutput] = []
    while engine.has_unfinished():
        seen += engine.step()
        replay.take(seen[-1])
    children = [standing.child for standing in replay.standings] or sorted(replay.tokens)
    for output, child in zip(seen[-1].outputs, children, strict=False):
        assert output.mixture == tuple(token.mixture for token in replay.tokens[child])
        assert all(token.mixture is not None and 0 <= token.mixture.alpha <= 1 for token in replay.tokens[child])


def test_a_beam_is_named_by_its_parent_as_it_stood_before_the_step() -> None:
    params = SamplingParams(strategy="beam_search", n=4, beam_width=4, max_tokens=6)
    seen = watch(fake_engine(), params)
    alive = {0}
    for output in seen:
        [step] = output.growth
        assert {token.parent for token in step.tokens} <= alive
        running = {standing.child for standing in step.standings if not standing.finished}
        alive = {token.child for token in step.tokens if token.finish_reason is None}
        assert alive == running
        assert len({token.position for token in step.tokens}) == 1
    assert len({token.child for token in seen[0].growth[0].tokens}) == 4


def test_groups_of_beams_are_told_apart() -> None:
    params = SamplingParams(
        strategy="beam_search", n=4, beam_width=4, num_beam_groups=2, diversity_penalty=1.0, max_tokens=4
    )
    for output in watch(fake_engine(), params):
        [step] = output.growth
        assert {standing.group for standing in step.standings} == {0, 1}


def test_an_aborted_request_ends_its_growth() -> None:
    engine = fake_engine()
    engine.add_request(Request("r", None, PROMPT, SamplingParams(n=3, max_tokens=50, output_kind="growth")))
    engine.step()
    output = engine.abort("r")
    assert output is not None
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert all(not step.tokens for step in output.growth)


def test_a_parent_of_requests_of_their_own_sees_no_steps() -> None:
    with pytest.raises(InvalidInputError, match="growth"):
        ParentRequest("parent", SamplingParams(n=2, output_kind="growth"))
