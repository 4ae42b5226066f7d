"""The server's fields are those of SamplingParams: every one of them, within the same limits, in the same words."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from ramify.cli.options import SAMPLING_FIELDS
from ramify.errors import InvalidInputError
from ramify.models.generation_defaults import NO_DEFAULTS
from ramify.sampling_params import PYTHON_ALONE, SamplingParams
from ramify.server.fields import BY_ROUTE, DIFFERENT, SHARED, SamplingFields
from ramify.server.protocol import CompletionRequest

TYPES = {option.name: str(option.type).removesuffix(" | None") for option in SHARED}
# What must be said with a field so that SamplingParams finds nothing wrong but the field itself.
COMPANIONS: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": None},
    "strategy": {"n": 2},
    "score": {"best_of": 2},
    "child": {"seed": 7},
    "beam_width": {"strategy": "beam_search"},
    "length_penalty": {"strategy": "beam_search"},
    "early_stopping": {"strategy": "beam_search"},
    "num_beam_groups": {"strategy": "beam_search", "beam_width": 16_384},
    "diversity_penalty": {"strategy": "diverse"},
    "dynatemp_range": {"temperature": 1e308},
}
# Powers of two and their neighbours: a group of beams must divide them.
INTEGERS = [-(2**63) - 1, -(2**63), -2, -1, 0, 1, 2, 16_384, 16_385, 2**31 - 1, 2**31, 2**64 - 1, 2**64]
NUMBERS = [-2.001, -2, -1e-9, 0, -0.0, 5e-324, 1, 1.001, 2, 2.001, 100.0, math.nan, math.inf, -math.inf, 10**400]
STRANGE = [True, False, "", "1", "never", [], [True], [1.0], ["1"], [[]], {}, 1.5, "beam_search", "mean_logprob"]
LENGTHS = [0, 1, 2, 16, 17, 128, 129, 1_024, 1_025]
LISTS = [kind * length for length in LENGTHS for kind in ([7], ["x"])]
EXTRA = {"child": [16_383]}  # no number of groups: tried on that field alone
ENTRIES = [[-1], [0], [2**31 - 1], [2**31], [""], ["x" * 1_024], ["x" * 1_025], [None]]


def server_takes(name: str, value: object) -> bool:
    try:
        SamplingFields.model_validate({name: value})
    except ValidationError:
        return False
    return True


def engine_takes(name: str, value: object) -> bool:
    try:
        SamplingParams(**{**COMPANIONS.get(name, {}), name: value})
    except InvalidInputError as error:
        return not str(error).startswith(name)  # a refusal of something else says nothing about this field
    return True


def test_a_field_of_sampling_params_is_sent_or_an_exception_that_is_written_down() -> None:
    named = {option.name for option in fields(SamplingParams)}
    assert named - set(SamplingFields.model_fields) == BY_ROUTE | PYTHON_ALONE
    assert set(SamplingFields.model_fields) - named == {"model"}
    assert named >= {*DIFFERENT, *BY_ROUTE, *PYTHON_ALONE}, "an exception for a field that is gone"
    assert set(CompletionRequest.model_fields) >= BY_ROUTE
    assert not set(CompletionRequest.model_fields) & PYTHON_ALONE


@pytest.mark.parametrize("name", sorted(set(TYPES) - set(DIFFERENT)))
def test_the_server_refuses_exactly_what_sampling_params_refuses(name: str) -> None:
    differing = [
        value
        for value in [*INTEGERS, *EXTRA.get(name, []), *NUMBERS, *STRANGE, *LISTS, *ENTRIES]
        if server_takes(name, value) != engine_takes(name, value)
    ]
    assert differing == []


def test_the_probes_reach_both_sides_of_every_limit() -> None:
    """Or the test above would agree about too little."""
    for option in SHARED:
        limits = option.metadata["limits"]
        probes = NUMBERS if TYPES[option.name] == "float" else [*INTEGERS, *EXTRA.get(option.name, [])]
        for limit in (limits.low, limits.above, limits.high):
            assert limit is None or (limit in probes and min(probes) < limit < max(probes))
        assert limits.most is None or {limits.most, limits.most + 1} <= set(LENGTHS)


@pytest.mark.parametrize("value", [-0.001, 0, 1, 2, 2.001, math.nan, "1", True])
def test_a_temperature_ends_where_openai_says(value: object) -> None:
    assert server_takes("temperature", value) == (engine_takes("temperature", value) and value != 2.001)


@pytest.mark.parametrize(
    "value", ["", "x", "x" * 1_024, "x" * 1_025, *LISTS, *ENTRIES], ids=lambda value: str(value)[:9]
)
def test_stop_is_a_text_or_texts_within_the_same_limits(value: object) -> None:
    assert server_takes("stop", value) == engine_takes("stop", value)


@pytest.mark.parametrize("count", LENGTHS)
def test_a_logit_bias_has_as_many_entries_with_its_ids_as_text(count: int) -> None:
    assert server_takes("logit_bias", {str(token_id): 1.0 for token_id in range(count)}) == (count <= 1_024)
    sent = SamplingFields.model_validate({"logit_bias": {"7": -1}})
    assert sent.sampling_params(NO_DEFAULTS).logit_bias == {7: -1}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_null_is_the_same_as_leaving_a_field_out(name: str) -> None:
    assert SamplingFields.model_validate({name: None}).sampling_params(NO_DEFAULTS) == SamplingParams()


def test_the_reference_says_what_the_command_line_says() -> None:
    flags = {option.name: option.metadata["help"] for option in SAMPLING_FIELDS}
    assert {option.name for option in fields(SamplingParams)} == {*flags, *PYTHON_ALONE}
    for option in SHARED:
        described = SamplingFields.model_fields[option.name].description
        assert described is not None
        assert described[0].lower() + described[1:].removesuffix(".").split("; by default")[0] == flags[option.name]
