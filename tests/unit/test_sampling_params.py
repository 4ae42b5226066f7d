"""What SamplingParams accepts, what it refuses by name, and that nobody can change it later."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.config import ModelConfig
from ramify.errors import InvalidInputError
from ramify.outputs import CompletionOutput
from ramify.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_SAMPLES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    OutputKind,
    SamplingParams,
    SamplingStrategy,
    SamplingType,
)

# The field, and the others that give it a meaning.
FLOAT_FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {},
    "min_p": {},
    "presence_penalty": {},
    "frequency_penalty": {},
    "repetition_penalty": {},
    "length_penalty": {"strategy": "beam_search"},
    "diversity_penalty": {"strategy": "diverse", "n": 2},
}
INTEGER_FIELDS: dict[str, dict[str, Any]] = {
    "n": {},
    "best_of": {},
    "top_k": {},
    "seed": {},
    "child": {"seed": 7},
    "max_tokens": {},
    "min_tokens": {},
    "logprobs": {},
    "prompt_logprobs": {},
    "beam_width": {"strategy": "beam_search"},
    "num_beam_groups": {"strategy": "beam_search"},
}
BOOLEAN_FIELDS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
ID_LIST_FIELDS = ("stop_token_ids", "allowed_token_ids")


def shortest(output: CompletionOutput) -> float:
    return -float(len(output.token_ids))


def keep_logits(token_ids: list[int], logits: Any) -> Any:
    del token_ids
    return logits


def assert_refused(field: str, **values: Any) -> str:
    """The error is ours and a ValueError, and its message begins with the field's name."""
    with pytest.raises(InvalidInputError, match=rf"^{field}\b") as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# -- defaults, names, types ----------------------------------------------------------------------------------


def test_every_field_has_its_documented_default() -> None:
    documented: dict[str, Any] = {
        "n": 1,
        "best_of": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "child": 0,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "strategy": None,
        "score": "cumulative_logprob",
        "beam_width": None,
        "length_penalty": 1.0,
        "early_stopping": False,
        "num_beam_groups": 1,
        "diversity_penalty": 0.0,
        "top_n_sigma": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "top_a": 0.0,
        "p_less": False,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "mirostat_tau": 0.0,
        "mirostat_eta": 0.1,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "smoothing_factor": 0.0,
        "no_repeat_ngram_size": 0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": None,
        "output_kind": OutputKind.FINAL_ONLY,
        "logits_processors": None,
        "return_kept": None,
        "speculate": True,
        "structured_outputs": None,
    }
    params = SamplingParams()
    assert {field.name: getattr(params, field.name) for field in fields(params)} == documented


def test_every_field_has_a_help_text() -> None:
    assert [field.name for field in fields(SamplingParams) if not field.metadata.get("help")] == []


@pytest.mark.parametrize("name", ["temprature", "use_beam_search", "max_new_tokens", ""])
def test_an_unknown_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^('?{name}'? is not a field|{name} must be)"):
        SamplingParams(**cast("dict[str, Any]", {name: 1}))


@pytest.mark.parametrize("strategy", list(SamplingStrategy))
def test_a_strategy_may_be_given_as_member_or_as_its_string(strategy: SamplingStrategy) -> None:
    assert SamplingParams(strategy=strategy.value).strategy is strategy
    assert SamplingParams(strategy=strategy).strategy is strategy


@pytest.mark.parametrize("kind", list(OutputKind))
def test_an_output_kind_may_be_given_as_member_or_as_its_string(kind: OutputKind) -> None:
    assert SamplingParams(output_kind=kind.value).output_kind is kind
    assert SamplingParams(output_kind=kind).output_kind is kind


def test_the_enumerations_have_the_documented_strings() -> None:
    strategies = {"parallel", "best_of_n", "beam_search", "diverse", "arithmetic", "without_replacement"}
    assert {strategy.value for strategy in SamplingStrategy} == strategies
    assert {kind.value for kind in OutputKind} == {"final_only", "delta", "cumulative", "growth"}
    assert {kind.name for kind in SamplingType} == {"GREEDY", "RANDOM"}


@pytest.mark.parametrize("value", ["beam", "PARALLEL", "", 1, True, [], SamplingType.GREEDY])
def test_a_strategy_that_is_none_of_them_is_refused(value: object) -> None:
    assert "'beam_search'" in assert_refused("strategy", strategy=value)


@pytest.mark.parametrize("value", ["stream", "DELTA", "", None, 0])
def test_an_output_kind_that_is_none_of_them_is_refused(value: object) -> None:
    assert "'cumulative'" in assert_refused("output_kind", output_kind=value)


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_infinities_are_refused_in_every_float_field(field: str, value: float) -> None:
    assert "finite" in assert_refused(field, **FLOAT_FIELDS[field], **{field: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_infinities_are_refused_in_a_logit_bias(value: float) -> None:
    assert "logit_bias[7]" in assert_refused("logit_bias", logit_bias={3: 1.0, 7: value})


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [True, False, "1", None, 1j, [1.0]], ids=repr)
def test_what_is_no_number_is_refused_in_every_float_field(field: str, value: object) -> None:
    assert repr(value) in assert_refused(field, **FLOAT_FIELDS[field], **{field: value})


@pytest.mark.parametrize("field", FLOAT_FIELDS)
def test_an_integer_too_large_for_a_float_is_refused(field: str) -> None:
    assert_refused(field, **FLOAT_FIELDS[field], **{field: 10**400})


@pytest.mark.parametrize("field", INTEGER_FIELDS)
@pytest.mark.parametrize("value", [True, False, 1.0, 1.5, math.nan, "1", [1]], ids=repr)
def test_booleans_floats_and_strings_are_refused_in_every_integer_field(field: str, value: object) -> None:
    assert repr(value) in assert_refused(field, **INTEGER_FIELDS[field], **{field: value})


@pytest.mark.parametrize("field", ["n", "top_k", "min_tokens", "num_beam_groups"])
def test_none_is_refused_in_integer_fields_that_always_have_a_value(field: str) -> None:
    assert_refused(field, **{field: None})


@pytest.mark.parametrize("field", BOOLEAN_FIELDS)
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_only_booleans_are_accepted_in_boolean_fields(field: str, value: object) -> None:
    assert_refused(field, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", MAX_SAMPLES + 1),
        ("best_of", 0),
        ("best_of", MAX_SAMPLES + 1),
        ("temperature", -0.001),
        ("top_p", 0),
        ("top_p", -0.0),
        ("top_p", -0.1),
        ("top_p", 1.001),
        ("top_k", -2),
        ("min_p", -0.001),
        ("min_p", 1.001),
        ("presence_penalty", -2.001),
        ("presence_penalty", 2.001),
        ("frequency_penalty", -2.001),
        ("frequency_penalty", 2.001),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("child", -1),
        ("child", MAX_SAMPLES),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("beam_width", 0),
        ("beam_width", MAX_SAMPLES + 1),
        ("num_beam_groups", 0),
        ("diversity_penalty", -0.001),
    ],
)
def test_a_value_just_outside_its_range_is_refused_and_shown(field: str, value: float) -> None:
    companions = {**FLOAT_FIELDS, **INTEGER_FIELDS}[field]
    assert repr(value) in assert_refused(field, **companions, **{field: value})


@pytest.mark.parametrize(
    "options",
    [
        {"n": MAX_SAMPLES},
        {"n": MAX_SAMPLES, "best_of": MAX_SAMPLES},
        {"temperature": 0},
        {"temperature": 100.0},
        {"temperature": 5e-324},
        {"top_p": 1},
        {"top_p": 5e-324},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 1},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"presence_penalty": 2, "frequency_penalty": -2},
        {"repetition_penalty": 5e-324},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"seed": 0},
        {"child": 0},
        {"child": MAX_SAMPLES - 1, "seed": 7},
        {"child": 3, "seed": 7, "temperature": 0},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"strategy": "beam_search", "length_penalty": -3.5},
        {"strategy": "beam_search", "beam_width": MAX_SAMPLES},
        {"strategy": "diverse", "n": 2, "diversity_penalty": 0},
        {"stop_token_ids": [0], "allowed_token_ids": [0], "logit_bias": {0: -100}},
    ],
    ids=str,
)
def test_a_value_at_the_end_of_its_range_is_accepted_unchanged(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("field", ["n", "best_of", "seed", "child", "beam_width"])
def test_an_integer_too_long_to_print_is_refused_like_any_other(field: str) -> None:
    # Python refuses to turn an int of more than 4,300 digits into a string: an error message must not try.
    assert_refused(field, **INTEGER_FIELDS[field], **{field: 10**5000})


def test_a_biased_token_id_too_long_to_print_meets_no_other_error_than_ours() -> None:
    with pytest.raises(InvalidInputError, match=r"^logit_bias\b"):
        SamplingParams(logit_bias={10**5000: math.nan})


# -- values that must fit each other -------------------------------------------------------------------------


@pytest.mark.parametrize("many", [{"best_of": 2}, {"n": 2, "strategy": "diverse"}], ids=str)
def test_a_child_names_samples_that_go_their_own_ways(many: dict[str, Any]) -> None:
    assert "looks at all of a set: got child 3" in assert_refused("child", child=3, seed=7, **many)
    assert "give the seed too" in assert_refused("child", child=3)
    assert SamplingParams(child=0, seed=7, **many).child == 0, "no child named: all of them"


def test_samples_may_be_counted_from_a_child_on() -> None:
    assert SamplingParams(n=2, child=3, seed=7).child == 3
    assert SamplingParams(n=2, child=16_382, seed=7).n == 2
    assert "child + n" in assert_refused("child", n=3, child=16_382, seed=7)


def test_best_of_below_n_is_refused() -> None:
    assert "n = 3" in assert_refused("best_of", n=3, best_of=2)


def test_best_of_equal_to_n_is_plain_parallel_sampling() -> None:
    params = SamplingParams(n=3, best_of=3)
    assert params.resolved_strategy is SamplingStrategy.PARALLEL
    assert params.num_samples == 3


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert "max_tokens = 4" in assert_refused("min_tokens", min_tokens=5, max_tokens=4)
    assert_refused("min_tokens", min_tokens=17)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_greedy_with_several_samples_is_refused(field: str) -> None:
    assert "temperature" in assert_refused(field, temperature=0, **{field: 2})


@pytest.mark.parametrize("strategy", ["parallel", "best_of_n", "diverse"])
def test_greedy_with_several_samples_is_refused_in_every_strategy_but_beam_search(strategy: str) -> None:
    assert_refused("n", temperature=0.0, n=2, strategy=strategy)
    assert SamplingParams(temperature=0.0, n=2, strategy="beam_search").n == 2


def test_prompt_logprobs_cannot_be_streamed() -> None:
    for kind in (OutputKind.DELTA, OutputKind.CUMULATIVE):
        assert "output_kind" in assert_refused("prompt_logprobs", prompt_logprobs=1, output_kind=kind)


BEAM_FIELDS: dict[str, Any] = {
    "beam_width": 4,
    "length_penalty": 0.5,
    "early_stopping": True,
    "num_beam_groups": 2,
}


@pytest.mark.parametrize("strategy", [None, "parallel", "best_of_n", "diverse"])
@pytest.mark.parametrize("field", BEAM_FIELDS)
def test_a_beam_field_outside_beam_search_is_refused(strategy: str | None, field: str) -> None:
    assert_refused(field, strategy=strategy, n=2, **{field: BEAM_FIELDS[field]})
    assert SamplingParams(strategy="beam_search", n=2, **{field: BEAM_FIELDS[field]}).n == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", 0), ("child", 1), ("best_of", 2), ("score", "mean_logprob"), ("score", shortest), ("temperature", 0.5)],
)
def test_a_sampling_field_inside_beam_search_is_refused(field: str, value: object) -> None:
    assert_refused(field, strategy="beam_search", **{field: value})


@pytest.mark.parametrize("temperature", [0, 0.0, 1, 1.0])
def test_a_beam_search_takes_the_default_temperature_or_zero(temperature: float) -> None:
    assert SamplingParams(strategy="beam_search", temperature=temperature).temperature == temperature


def test_a_beam_search_refuses_more_outputs_than_beams() -> None:
    assert "beam_width = 3" in assert_refused("n", strategy="beam_search", n=4, beam_width=3)


@pytest.mark.parametrize("groups", [3, 5, 8])
def test_groups_of_beams_must_divide_the_beams(groups: int) -> None:
    assert_refused("num_beam_groups", strategy="beam_search", beam_width=4, num_beam_groups=groups)


def test_a_diversity_penalty_needs_groups_or_the_diverse_strategy() -> None:
    for strategy in (None, "parallel", "best_of_n", "beam_search"):
        assert_refused("diversity_penalty", strategy=strategy, n=2, diversity_penalty=0.5)
    assert SamplingParams(strategy="diverse", n=2, diversity_penalty=0.5).diversity_penalty == 0.5
    grouped = SamplingParams(strategy="beam_search", beam_width=4, num_beam_groups=2, diversity_penalty=0.5)
    assert grouped.diversity_penalty == 0.5


def test_stop_strings_in_a_beam_search_are_refused() -> None:
    assert_refused("stop", strategy="beam_search", stop="end")
    assert SamplingParams(strategy="beam_search", stop_token_ids=[2]).stop_token_ids == (2,)


def test_deltas_are_refused_where_outputs_are_ranked_at_the_end() -> None:
    assert_refused("output_kind", n=1, best_of=2, output_kind="delta")
    assert_refused("output_kind", strategy="beam_search", output_kind="delta")
    assert SamplingParams(n=2, output_kind="delta").output_kind is OutputKind.DELTA
    assert SamplingParams(n=1, best_of=2, output_kind="cumulative").best_of == 2


def test_a_score_is_refused_where_nothing_is_ranked() -> None:
    for options in ({}, {"n": 2}, {"strategy": "parallel"}, {"strategy": "diverse", "n": 2}):
        assert_refused("score", score="mean_logprob", **options)
    assert SamplingParams(best_of=2, score=shortest).score is shortest


@pytest.mark.parametrize("value", ["sum", "", None, 1, 0.5])
def test_a_score_is_one_of_two_names_or_a_function(value: object) -> None:
    assert_refused("score", best_of=2, score=value)


def test_best_of_more_than_n_contradicts_parallel_and_diverse() -> None:
    assert_refused("best_of", n=1, best_of=2, strategy="parallel")
    assert_refused("best_of", n=1, best_of=2, strategy="diverse")


@pytest.mark.parametrize("value", ["always", "", None, 0, 1, "True"])
def test_early_stopping_is_true_false_or_never(value: object) -> None:
    assert_refused("early_stopping", strategy="beam_search", early_stopping=value)


# -- lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ID_LIST_FIELDS)
@pytest.mark.parametrize("value", [[-1], [3, 2**31 - 1, -5], [True], [1.0], ["1"], [None], [math.nan]], ids=repr)
def test_lists_of_token_ids_hold_integers_from_zero(field: str, value: list[object]) -> None:
    assert f"{field}[{len(value) - 1}]" in assert_refused(field, **{field: value})


@pytest.mark.parametrize("key", [-1, True, 1.0, "1", None], ids=repr)
def test_biased_token_ids_are_integers_from_zero(key: object) -> None:
    assert repr(key) in assert_refused("logit_bias", logit_bias={key: 1.0})


@pytest.mark.parametrize("bias", [True, "1", None, 10**400], ids=["bool", "str", "None", "too large"])
def test_biases_are_finite_numbers(bias: object) -> None:
    assert_refused("logit_bias", logit_bias={1: bias})


@pytest.mark.parametrize("value", [[(1, 2.0)], "1:2", 5])
def test_a_logit_bias_is_a_mapping(value: object) -> None:
    assert_refused("logit_bias", logit_bias=value)


@pytest.mark.parametrize("field", [*ID_LIST_FIELDS, "bad_words", "logits_processors"])
@pytest.mark.parametrize("value", ["12", b"12", 12, {1: 2}], ids=repr)
def test_what_is_no_list_is_refused_in_list_fields(field: str, value: object) -> None:
    assert_refused(field, **{field: value})


@pytest.mark.parametrize(
    ("field", "most", "entries"),
    [
        ("logit_bias", MAX_LOGIT_BIASES, lambda count: dict.fromkeys(range(count), 1.0)),
        ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, lambda count: list(range(count))),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS, lambda count: list(range(count))),
        ("stop", MAX_STOP_STRINGS, lambda count: [f"stop {index}" for index in range(count)]),
        ("bad_words", MAX_BAD_WORDS, lambda count: [f"word {index}" for index in range(count)]),
        ("logits_processors", 128, lambda count: [keep_logits] * count),
    ],
)
def test_one_entry_more_than_the_most_is_refused_and_the_most_is_accepted(field: str, most: int, entries: Any) -> None:
    assert len(getattr(SamplingParams(**{field: entries(most)}), field)) == most
    message = assert_refused(field, **{field: entries(most + 1)})
    assert str(most) in message
    assert str(most + 1) in message


def test_the_counts_are_those_of_the_security_rules() -> None:
    assert (MAX_SAMPLES, MAX_LOGIT_BIASES, MAX_ALLOWED_TOKEN_IDS) == (16_384, 1_024, 1_024)
    assert (MAX_STOP_TOKEN_IDS, MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_LENGTH) == (128, 128, 16, 1_024)


def test_an_empty_list_of_allowed_tokens_is_refused() -> None:
    assert_refused("allowed_token_ids", allowed_token_ids=[])


@pytest.mark.parametrize("value", ["", [""], ["fine", ""], [1], [None], 7, {"a": 1}], ids=repr)
def test_an_empty_stop_string_or_none_at_all_is_refused(value: object) -> None:
    assert_refused("stop", stop=value)


def test_a_stop_string_has_a_longest_length() -> None:
    longest = "x" * MAX_STOP_LENGTH
    assert SamplingParams(stop=longest).stop_strings == (longest,)
    assert str(MAX_STOP_LENGTH) in assert_refused("stop", stop=["fine", longest + "x"])


def test_stop_strings_without_text_are_refused() -> None:
    assert "detokenize" in assert_refused("stop", stop=["end"], detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop_strings == ()


@pytest.mark.parametrize(
    "value", [[""], [1], ["fine", None], ["x" * (MAX_STOP_LENGTH + 1)]], ids=["", "1", "None", "long"]
)
def test_bad_words_are_texts_of_bounded_length(value: list[object]) -> None:
    assert_refused("bad_words", bad_words=value)


def test_logits_processors_can_be_called() -> None:
    assert SamplingParams(logits_processors=[keep_logits]).logits_processors == (keep_logits,)
    assert "logits_processors[1]" in assert_refused("logits_processors", logits_processors=[keep_logits, "no"])


# -- what it answers -----------------------------------------------------------------------------------------


def test_temperature_zero_is_greedy_and_anything_above_is_random() -> None:
    assert SamplingParams(temperature=0).sampling_type is SamplingType.GREEDY
    assert SamplingParams(temperature=-0.0).sampling_type is SamplingType.GREEDY
    assert SamplingParams(temperature=5e-324).sampling_type is SamplingType.RANDOM
    assert SamplingParams().sampling_type is SamplingType.RANDOM


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingStrategy.PARALLEL),
        ({"n": 4}, SamplingStrategy.PARALLEL),
        ({"n": 4, "best_of": 4}, SamplingStrategy.PARALLEL),
        ({"n": 4, "best_of": 5}, SamplingStrategy.BEST_OF_N),
        ({"strategy": "best_of_n"}, SamplingStrategy.BEST_OF_N),
        ({"strategy": "diverse", "n": 4}, SamplingStrategy.DIVERSE),
        ({"strategy": "beam_search"}, SamplingStrategy.BEAM_SEARCH),
    ],
    ids=str,
)
def test_the_strategy_follows_from_best_of_unless_named(options: dict[str, Any], expected: SamplingStrategy) -> None:
    assert SamplingParams(**options).resolved_strategy is expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"n": 2}, True),
        ({"best_of": 1}, False),
        ({"best_of": 2}, True),
        ({"strategy": "diverse"}, False),
        ({"strategy": "diverse", "n": 2}, True),
        ({"strategy": "beam_search"}, True),
        ({"strategy": "beam_search", "beam_width": 1}, True),
    ],
    ids=str,
)
def test_parallel_sampling_is_required_when_one_prompt_becomes_several(options: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**options).requires_parallel_sampling() is expected


def test_the_beam_width_defaults_to_n_and_at_least_two() -> None:
    widths = [SamplingParams(strategy="beam_search", n=n).resolved_beam_width for n in (1, 2, 3, 7)]
    assert widths == [2, 2, 3, 7]
    assert SamplingParams(strategy="beam_search", beam_width=5).resolved_beam_width == 5


@pytest.mark.parametrize(
    ("options", "num_children", "num_together"),
    [
        ({}, 1, None),
        ({"n": 3}, 3, None),
        ({"n": 2, "best_of": 5}, 5, None),
        ({"n": 3, "strategy": "diverse"}, 3, 3),
        ({"strategy": "beam_search"}, 2, 2),
        ({"strategy": "beam_search", "n": 2, "beam_width": 6}, 6, 6),
    ],
)
def test_a_prompt_grows_into_samples_or_beams(
    options: dict[str, Any], num_children: int, num_together: int | None
) -> None:
    params = SamplingParams(**options)
    assert (params.num_children, params.num_together) == (num_children, num_together)


def test_one_stop_string_is_not_a_list_of_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


# -- frozen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_no_field_can_be_assigned(field: str) -> None:
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        setattr(params, field, getattr(params, field))


def test_changing_the_callers_lists_later_changes_nothing() -> None:
    given_lists: dict[str, Any] = {
        "stop": ["a"],
        "stop_token_ids": [1],
        "allowed_token_ids": [2],
        "bad_words": ["b"],
        "logits_processors": [keep_logits],
    }
    biases: dict[int, float] = {3: 1.0}
    params = SamplingParams(**given_lists, logit_bias=biases)
    before = {name: tuple(value) for name, value in given_lists.items()}
    for value in given_lists.values():
        value.append("later")
    biases[4] = math.nan
    assert {name: getattr(params, name) for name in given_lists} == before
    assert params.logit_bias == {3: 1.0}


def test_a_replaced_field_is_checked_again() -> None:
    params = SamplingParams(n=2, stop=["x"], logit_bias={1: 2.0})
    assert replace(params, n=3) == SamplingParams(n=3, stop=["x"], logit_bias={1: 2.0})
    with pytest.raises(InvalidInputError, match=r"^n must be"):
        replace(params, n=0)


# -- against a model -----------------------------------------------------------------------------------------


VOCABULARY = 100


def check_against_model(params: SamplingParams) -> None:
    params.check_against(vocab_size=VOCABULARY, max_logprobs=ModelConfig().max_logprobs)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("stop_token_ids", [0, 99], [0, 100]),
        ("allowed_token_ids", [99], [100]),
        ("logit_bias", {99: 1.0}, {100: 1.0}),
        ("logprobs", 20, 21),
        ("prompt_logprobs", 20, 21),
    ],
)
def test_a_model_refuses_ids_past_its_vocabulary_and_long_reports(field: str, inside: Any, outside: Any) -> None:
    check_against_model(SamplingParams(**{field: inside}))
    params = SamplingParams(**{field: outside})
    with pytest.raises(InvalidInputError, match=rf"^{field}\b"):
        check_against_model(params)


def test_params_without_ids_or_reports_suit_every_model() -> None:
    SamplingParams().check_against(vocab_size=1, max_logprobs=0)


# -- any combination -----------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
token_ids = st.integers(0, 2**31 - 1)
stop_texts = st.text("ab \n</>é日", min_size=1, max_size=20)


@st.composite
def valid_options(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that stand alone, then those that must fit each other."""
    options: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "top_p": st.floats(0, 1, exclude_min=True),
                "top_k": st.integers(-1, 10**9),
                "min_p": st.floats(0, 1),
                "presence_penalty": st.floats(-2, 2),
                "frequency_penalty": st.floats(-2, 2),
                "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False),
                "stop_token_ids": st.lists(token_ids, max_size=5),
                "include_stop_str_in_output": st.booleans(),
                "ignore_eos": st.booleans(),
                "logprobs": st.none() | st.integers(0, 10**6),
                "logit_bias": st.none() | st.dictionaries(token_ids, finite, max_size=5),
                "allowed_token_ids": st.none() | st.lists(token_ids, min_size=1, max_size=5),
                "bad_words": st.none() | st.lists(stop_texts, max_size=5),
                "skip_special_tokens": st.booleans(),
                "logits_processors": st.none() | st.just([keep_logits]),
            },
        )
    )
    options["max_tokens"] = longest = draw(st.none() | st.integers(1, 10**6))
    options["min_tokens"] = draw(st.integers(0, 10**6 if longest is None else longest))
    options["n"] = samples = draw(st.integers(1, 50))
    options["strategy"] = strategy = draw(st.none() | st.sampled_from(SamplingStrategy))
    kinds = list(OutputKind)
    if strategy is SamplingStrategy.BEAM_SEARCH:
        kinds.remove(OutputKind.DELTA)
        options["temperature"] = draw(st.sampled_from([0, 1, 0.0, 1.0]))
        options["num_beam_groups"] = groups = draw(st.integers(1, 5))
        options["beam_width"] = groups * draw(st.integers(-(-samples // groups), 100))
        options["length_penalty"] = draw(finite)
        options["early_stopping"] = draw(st.sampled_from([True, False, "never"]))
        if groups > 1:
            options["diversity_penalty"] = draw(st.floats(0, allow_infinity=False))
    else:
        options["seed"] = draw(st.none() | st.integers(-(2**63), 2**64 - 1))
        options["detokenize"] = draw(st.booleans())
        if options["detokenize"] and strategy is not SamplingStrategy.WITHOUT_REPLACEMENT:
            options["stop"] = draw(st.none() | stop_texts | st.lists(stop_texts, max_size=5))
        is_distinct = strategy is SamplingStrategy.WITHOUT_REPLACEMENT
        if is_distinct:
            kinds.remove(OutputKind.DELTA)
        if strategy is SamplingStrategy.DIVERSE:
            options["diversity_penalty"] = draw(st.floats(0, allow_infinity=False))
        elif strategy in (None, SamplingStrategy.BEST_OF_N):
            options["best_of"] = most = draw(st.none() | st.integers(samples, 60))
            if most is not None and most > samples:
                kinds.remove(OutputKind.DELTA)
                samples = most
            if samples > options["n"] or strategy is SamplingStrategy.BEST_OF_N:
                options["score"] = draw(st.sampled_from(["cumulative_logprob", "mean_logprob", shortest]))
        options["temperature"] = draw(st.floats(0, exclude_min=samples > 1 or is_distinct, allow_infinity=False))
    options["output_kind"] = draw(st.sampled_from(kinds) | st.sampled_from([kind.value for kind in kinds]))
    if options["output_kind"] == OutputKind.FINAL_ONLY:
        options["prompt_logprobs"] = draw(st.none() | st.integers(0, 10**6))
    return options


@settings(deadline=None)
@given(valid_options())
def test_any_combination_of_valid_values_is_accepted_and_kept(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        expected = (value,) if name == "stop" and isinstance(value, str) else value
        assert getattr(params, name) == (tuple(expected) if isinstance(expected, list) else expected)
    assert params.num_samples == (options.get("best_of") or options["n"])
    assert replace(params) == params


above_the_cap = st.integers(MAX_SAMPLES + 1)
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
outside_two = st.floats(max_value=-2, exclude_max=True) | st.floats(min_value=2, exclude_min=True)
OUT_OF_RANGE: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(max_value=0) | above_the_cap,
    "best_of": st.integers(max_value=0) | above_the_cap,
    "beam_width": st.integers(max_value=0) | above_the_cap,
    "num_beam_groups": st.integers(max_value=0),
    "top_k": st.integers(max_value=-2),
    "seed": st.integers(max_value=-(2**63) - 1) | st.integers(2**64),
    "child": st.integers(max_value=-1) | above_the_cap,
    "max_tokens": st.integers(max_value=-1),
    "min_tokens": st.integers(max_value=-1),
    "logprobs": st.integers(max_value=-1),
    "prompt_logprobs": st.integers(max_value=-1),
    "temperature": st.floats(max_value=0, exclude_max=True) | not_finite,
    "top_p": st.floats(max_value=0) | st.floats(min_value=1, exclude_min=True) | not_finite,
    "min_p": st.floats(max_value=0, exclude_max=True) | st.floats(min_value=1, exclude_min=True) | not_finite,
    "presence_penalty": outside_two | not_finite,
    "frequency_penalty": outside_two | not_finite,
    "repetition_penalty": st.floats(max_value=0) | not_finite,
    "length_penalty": not_finite,
    "diversity_penalty": st.floats(max_value=0, exclude_max=True) | not_finite,
}


@settings(deadline=None)
@given(valid_options(), st.data())
def test_any_single_number_out_of_range_is_refused_by_name(options: dict[str, Any], data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(OUT_OF_RANGE)))
    assert_refused(field, **{**options, field: data.draw(OUT_OF_RANGE[field])})


def test_every_numeric_field_is_among_those_tried_out_of_range() -> None:
    assert set(OUT_OF_RANGE) == set(FLOAT_FIELDS) | set(INTEGER_FIELDS)


@pytest.mark.parametrize("value", [0, 2, -1, math.nan, math.inf, "1"])
def test_a_refused_top_p_is_told_its_whole_range(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="top_p must be a finite number above 0 and at most 1, got "):
        SamplingParams(top_p=value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": np.int64(3)}, r"got np\.int64\(3\); its \.tolist\(\) is of Python's own types"),
        ({"temperature": np.float32(0.5)}, r"got np\.float32\(0\.5\); its \.tolist\(\) is of Python's own types"),
        ({"stop_token_ids": np.array([1])}, r"must be a list, got array\(\[1\]\); its \.tolist\(\)"),
        ({"temperature": np.float64("nan")}, r"must be a finite number >= 0, got np\.float64\(nan\)$"),
        ({"seed": "3"}, "got '3'$"),
    ],
)
def test_what_looks_right_but_is_numpys_is_told_apart(given: dict[str, Any], message: str) -> None:
    """An integer in 1..16384 was asked for and, as it seemed, given."""
    with pytest.raises(InvalidInputError, match=message):
        SamplingParams(**given)
