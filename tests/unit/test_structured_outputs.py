"""Outputs with a structure: every way of drawing them against one child at a time, masked by brute force."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import exp
from typing import Any

import pytest
import torch

from ramify import InvalidInputError, Request, SamplingParams
from ramify.config import MixtureConfig
from ramify.engine.core import EngineCore
from ramify.engine.demands import Demands
from ramify.engine.drafting.lookup import LookupDrafter
from ramify.engine.plan import Draw
from ramify.errors import UnsupportedError
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from ramify.structured.grammars import Grammars
from ramify.structured.matcher import LocalMatcher
from ramify.structured_outputs import Structure, checked_structure
from ramify.text.codec import TextCodec
from tests.drive import finish, tokens_of
from tests.fake import VOCAB, fake_engine, letters, logits_after

llguidance = pytest.importorskip("llguidance")

EOS = 0
CHOICES = ("ab", "abcab", "bb", "ccabc", "cab")
CHOICE = {"choice": CHOICES}
PROMPTS = ([1, 2, 3], [7, 5], [9, 9, 9, 4, 1, 5, 6])


@cache
def codec() -> TextCodec:
    return letters()


@cache
def grammars() -> Grammars:
    """One for all tests: its process is started once."""
    return Grammars(codec())


@cache
def spelling(token_id: int) -> str:
    return codec().decode([token_id])


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(spelling(token_id) for token_id in token_ids if token_id != EOS)


def goes_on(output: Sequence[int], token_id: int) -> bool:
    """By brute force: whether one of the choices begins with the output and this token."""
    text = text_of(output)
    if token_id == EOS:
        return text in CHOICES
    return token_id > 1 and any(choice.startswith(text + spelling(token_id)) for choice in CHOICES)


def engine(**options: Any) -> EngineCore:
    core = fake_engine(eos_token_ids=frozenset({EOS}), **options)
    core.begin_matcher = grammars().begin
    return core


def keeping_to_choices(token_ids: Sequence[int], logits: torch.Tensor, prompt: Sequence[int]) -> torch.Tensor:
    """The same mask as a processor of a caller's own."""
    output = list(token_ids)[len(prompt) :]
    allowed = torch.tensor([goes_on(output, token_id) for token_id in range(VOCAB)])
    return logits.masked_fill(~allowed, -torch.inf)


def masked(params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
    return replace(
        params,
        structured_outputs=None,
        logits_processors=[lambda token_ids, logits: keeping_to_choices(token_ids, logits, prompt)],
    )


WAYS: dict[str, dict[str, Any]] = {
    "one": {"seed": 3},
    "greedy": {"temperature": 0},
    "many": {"n": 6, "seed": 4},
    "warm": {"n": 6, "seed": 4, "temperature": 1.7, "top_p": 0.9},
    "best of": {"n": 2, "best_of": 6, "seed": 5},
    "beams": {"n": 3, "strategy": "beam_search", "beam_width": 4},
    "many beams": {"n": 5, "strategy": "beam_search", "beam_width": 8},
    "group beams": {"n": 4, "strategy": "beam_search", "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "diverse": {"n": 4, "strategy": "diverse", "diversity_penalty": 2.0, "seed": 6},
    "distinct": {"n": 4, "strategy": "without_replacement", "seed": 7},
    "arithmetic": {"n": 4, "strategy": "arithmetic", "seed": 8},
    "penalties": {"n": 3, "seed": 9, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {2: 4.0}},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_drawing_equals_a_masked_reference(way: str) -> None:
    params = SamplingParams(max_tokens=8, structured_outputs=CHOICE, logprobs=2, **WAYS[way])
    found = finish(engine(), [(prompt, params) for prompt in PROMPTS])
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert output.error is None
        [expected] = finish(engine(), [(prompt, masked(params, prompt))])
        assert tokens_of(output) == tokens_of(expected)
        sums = [(each.cumulative_logprob, each.score) for each in output.outputs]
        assert sums == [(each.cumulative_logprob, each.score) for each in expected.outputs]
        assert {text_of(each.token_ids) for each in output.outputs} <= set(CHOICES)
        assert {each.finish_reason for each in output.outputs} == {"stop"}


@pytest.fixture(scope="module")
def by_workers() -> Iterator[Grammars]:
    own = Grammars(codec())
    own.use_workers(2)
    yield own
    if own._workers is not None:
        own._workers.close()


@pytest.mark.parametrize("way", [*WAYS, "drafted"])
def test_processes_that_find_masks_change_nothing(by_workers: Grammars, way: str) -> None:
    options: dict[str, Any] = {"drafter": LookupDrafter("suffix")} if way == "drafted" else {}
    pattern = {"regex": "((ab|ba)c){3,6}"} if way == "drafted" else CHOICE
    params = SamplingParams(max_tokens=24, structured_outputs=pattern, logprobs=2, **WAYS.get(way, {"n": 3, "seed": 5}))
    expected = finish(engine(), [(prompt, params) for prompt in PROMPTS])
    core = engine(**options)
    core.begin_matcher = by_workers.begin
    found = finish(core, [(prompt, params) for prompt in PROMPTS])
    assert [tokens_of(output) for output in found] == [tokens_of(output) for output in expected]
    assert not any(output.error for output in found)
    assert by_workers._workers is not None


def test_fewer_texts_than_samples_without_replacement() -> None:
    params = SamplingParams(
        n=16, seed=1, max_tokens=8, strategy="without_replacement", structured_outputs={"choice": ["b", "c"]}
    )
    [output] = finish(engine(), [([1, 2], params)])
    assert sorted(text_of(each.token_ids) for each in output.outputs) == ["b", "c"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 14},
        {"num_blocks": 14, "preemption_mode": "swap", "num_host_blocks": 64},
        {"max_num_batched_tokens": 4},
        {"runs_ahead": True},
        {"drafter": LookupDrafter("suffix")},
        {"drafter": LookupDrafter("ngram"), "runs_ahead": True},
    ],
    ids=["recomputed", "swapped", "chunked", "ahead", "drafted", "drafted ahead"],
)
def test_the_same_whatever_the_engine_does_in_between(options: dict[str, Any]) -> None:
    pattern = {"regex": "((ab|ba)c){3,6}"}
    asked = [
        (prompt, SamplingParams(n=3, seed=number, max_tokens=24, structured_outputs=pattern))
        for number, prompt in enumerate([*PROMPTS, [3] * 9])
    ]
    asked.append(([1, 2], SamplingParams(n=2, seed=8, max_tokens=24)))
    core = engine(**options)
    found = finish(core, asked)
    assert [tokens_of(output) for output in found] == [tokens_of(output) for output in finish(engine(), asked)]
    if "num_blocks" in options:
        assert core.stats()["preemptions"] > 0


def test_drafts_that_break_the_grammar_are_drawn_as_ever() -> None:
    """What was drafted may be no text of the grammar: the draw before it does not draw it."""

    class Stubborn(LookupDrafter):
        def draft(self, wanted: Any) -> list[list[int]]:
            return [[2, 5, EOS, 3][: each.most] for each in wanted]

    params = SamplingParams(n=3, seed=2, max_tokens=24, structured_outputs={"regex": "(ab?c?)*b"})
    found = finish(engine(drafter=Stubborn("ngram")), [(prompt, params) for prompt in PROMPTS])
    expected = finish(engine(), [(prompt, params) for prompt in PROMPTS])
    assert [tokens_of(output) for output in found] == [tokens_of(output) for output in expected]


def test_two_models_are_mixed_under_one_mask() -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=8, structured_outputs=CHOICE)
    mixer = Mixer(MixtureConfig())
    core = engine(num_models=2, mixer=mixer)
    teacher, theta = [1, 2, 3], [4, 5]
    core.add_request(Request("0", None, teacher, params, other_prompts=[(1, theta)]))
    output = next(each for _ in range(100) for each in core.step() if each.finished)
    demands = Demands(params, seed=3, eos_token_ids=frozenset({EOS}), prompts=(tuple(teacher), tuple(theta)))
    for child, found in enumerate(output.outputs):
        written: list[int] = []
        while written[-1:] != [EOS]:
            allowed = torch.tensor([goes_on(written, token_id) for token_id in range(VOCAB)])
            sources = [
                Source(logits_after([*prompt, *written], model)[None].masked_fill(~allowed, -torch.inf), [0])
                for model, prompt in enumerate((teacher, theta))
            ]
            draw = Draw("x", child, child, len(written), (), demands, list(written))
            written += Sampler(mixer=mixer).sample(sources, [draw]).token_ids
        assert found.token_ids == tuple(written)


def test_texts_come_as_often_as_the_renormalised_model_says() -> None:
    """Chi-square over all token sequences of a grammar with finitely many."""
    prompt = [1, 2, 3]
    weights: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], weight: float) -> None:
        allowed = [token_id for token_id in range(VOCAB) if goes_on(output, token_id)]
        logprobs = logits_after([*prompt, *output])[allowed].log_softmax(0).tolist()
        for token_id, logprob in zip(allowed, logprobs, strict=True):
            if token_id == EOS:
                weights[*output, EOS] = weight * exp(logprob)
            else:
                grow((*output, token_id), weight * exp(logprob))

    grow((), 1.0)
    assert abs(sum(weights.values()) - 1) < 1e-5
    count = 1_500
    params = SamplingParams(n=count, seed=11, max_tokens=8, structured_outputs=CHOICE)
    [output] = finish(engine(max_num_seqs=512, num_blocks=2_048, max_num_batched_tokens=1_024), [(prompt, params)])
    drawn = tokens_of(output)
    assert set(drawn) <= set(weights)
    common = [each for each, weight in weights.items() if weight * count >= 5]
    rest = count - sum(map(drawn.count, common))
    expected_rest = count * (1 - sum(weights[each] for each in common))
    chi = sum((drawn.count(each) - count * weights[each]) ** 2 / (count * weights[each]) for each in common)
    chi += (rest - expected_rest) ** 2 / max(expected_rest, 1.0)
    freedom = len(common)
    assert len(common) >= 5
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_a_grammar_that_gets_too_large_ends_its_request_alone() -> None:
    core = engine()
    begin = core.begin_matcher
    assert begin is not None

    def poisoned(structure: Structure, ends: Sequence[int], begun: Sequence[int]) -> Any:
        matcher = begin(structure, ends, begun)
        assert isinstance(matcher, LocalMatcher)
        matcher.state.consume_token(VOCAB - 1)  # no text of it: from here on llguidance reports an error
        return matcher

    core.begin_matcher = poisoned
    sick = SamplingParams(max_tokens=8, structured_outputs={"choice": ["ab"]})
    found = finish(core, [([1, 2], sick), ([1, 2, 3], SamplingParams(max_tokens=4, seed=1))])
    assert found[0].outputs[0].finish_reason == "error"
    assert found[0].error is not None
    assert "cannot be followed any further" in found[0].error
    assert found[1].error is None


def test_controls_that_leave_nothing_name_the_structure() -> None:
    params = SamplingParams(max_tokens=8, structured_outputs={"choice": ["ab"]}, allowed_token_ids=[4])
    [output] = finish(engine(), [([1, 2], params)])
    assert output.error is not None
    assert "structured_outputs" in output.error


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    ("a", "must be a dict with one of the keys 'json', 'regex', 'choice', 'grammar', got 'a'"),
    ({}, "one of the keys"),
    ({"json": {}, "regex": "a"}, "one of the keys"),
    ({"yaml": "a"}, "one of the keys"),
    ({"json": 5}, "['json'] must be a JSON schema: a dict, or its text, got 5"),
    ({"json": '{"type": '}, "is no JSON"),
    ({"json": {"minimum": float("nan")}}, "cannot be written as JSON"),
    ({"json": {"a": object()}}, "cannot be written as JSON"),
    ({"json": "[" * 100_000}, "at most 64 levels deep"),
    ({"json": {"description": "x" * 300_000}}, "at most 262144 characters"),
    ({"regex": ""}, "non-empty"),
    ({"regex": "\ud800"}, "lone surrogate"),
    ({"choice": []}, "at least one entry"),
    ({"choice": "yes"}, "a list"),
    ({"choice": ["yes", 5]}, "['choice'][1] must be a non-empty string"),
    ({"choice": ["x"] * 5_000}, "at most 4096 entries"),
    ({"grammar": None}, "non-empty"),
]


@pytest.mark.parametrize(("value", "said"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_no_structure_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(structured_outputs=value)
    assert str(caught.value).startswith("structured_outputs")
    assert said in str(caught.value)


def test_a_circle_is_no_schema() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        SamplingParams(structured_outputs={"json": schema})


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_else_says_where_outputs_end_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="say where outputs end"):
        SamplingParams(structured_outputs=CHOICE, **other)


def test_nobody_changes_a_structure_later() -> None:
    schema = {"type": "object"}
    params = SamplingParams(structured_outputs={"json": schema})
    schema["type"] = "string"
    assert params.structure == Structure("json", '{"type": "object"}')
    assert replace(params, n=2).structure == params.structure, "what was checked is taken again"
    again = SamplingParams(structured_outputs=checked_structure("x", params.structured_outputs))
    assert again == params


def schema_with(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": part}]}}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": schema_with({"type": "strin"})}, "at ['properties']['a']['anyOf'][1]['items']: Invalid type: strin"),
    ({"json": {"$defs": {"x": {"minimum": "1"}}, "properties": {"b": {"$ref": "#/$defs/x"}}}}, "['$defs']['x']"),
    ({"json": {"properties": {"b": {"uniqueItems": True}}}}, "at ['properties']['b']: Unimplemented keys"),
    ({"json": {"properties": {"b": {"$ref": "#/nowhere"}}}}, "at ['properties']['b']: Pointer"),
    ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    ({"json": False}, "cannot be followed"),
    ({"regex": "abc(d"}, "character 3: unclosed group"),
    ({"regex": r"(a)\1"}, "character 3: backreferences are not supported"),
    ({"grammar": 'x: "a"\nstart: nowhere'}, 'line 2, column 8: unknown name: "nowhere"'),
    ({"regex": "[0-9]"}, "the model's tokens can spell no text of it"),
    ({"grammar": 'root ::= "a" nowhere'}, "nowhere"),
    ({"grammar": "start: %json {"}, "cannot be followed"),
]


@pytest.mark.parametrize(("structure", "said"), BAD, ids=lambda value: str(value)[:40])
def test_a_grammar_that_is_none_is_refused_with_its_place(structure: dict[str, Any], said: str) -> None:
    wanted = SamplingParams(structured_outputs=structure).structure
    assert wanted is not None
    with pytest.raises(InvalidInputError) as caught:
        grammars().check(wanted)
    assert str(caught.value).startswith(f"structured_outputs[{wanted.kind!r}] cannot be followed: ")
    assert said in str(caught.value)


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "multiples": lambda: {"json": {"type": "integer", "multipleOf": 999_983}},
    "combinations": lambda: {
        "json": {"allOf": [{"anyOf": [{"type": "string", "pattern": f"a{i}b{j}"} for j in range(6)]} for i in range(8)]}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_structure_that_explodes_is_refused(name: str) -> None:
    """Each of these takes seconds to minutes, or hundreds of megabytes, where nothing bounds it."""
    wanted = SamplingParams(structured_outputs=HOSTILE[name]()).structure
    assert wanted is not None
    with pytest.raises(InvalidInputError, match=r"too (long|much memory|large|big)"):
        grammars().check(wanted)
    grammars().check(Structure("regex", "a+"))  # whatever became of its process


def test_models_without_text_or_end_have_no_structure() -> None:
    with pytest.raises(UnsupportedError, match="need a tokenizer"):
        Grammars(TextCodec(None)).check(Structure("regex", "a"))
    with pytest.raises(UnsupportedError, match="a token that ends an output"):
        grammars().begin(Structure("regex", "a"), [])
    with pytest.raises(InvalidInputError, match="need a tokenizer"):
        fake_engine().add_request(Request("0", None, [1], SamplingParams(structured_outputs=CHOICE)))


def test_only_the_latest_grammars_are_kept() -> None:
    own = Grammars(codec())
    for number in range(40):
        own.check(Structure("choice", json.dumps(["a" * (number + 1)])))
    assert len(own._built) == 32
