"""What a checkpoint recommends: read strictly, used where a caller says nothing, never a reason to refuse a request."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ramify.config import ModelConfig
from ramify.errors import FileFormatError, InvalidInputError, ModelError
from ramify.models import embedded
from ramify.models.generation_defaults import (
    GGUF_KEYS,
    NO_DEFAULTS,
    GenerationDefaults,
    defaults_from_config,
    defaults_from_gguf,
)
from ramify.models.loader import ModelLoader
from ramify.optimal import OptimalSampling
from ramify.sampling_params import SamplingParams
from ramify.server.protocol import ChatCompletionRequest, CompletionRequest, GrowthRequest

RECOMMENDED = GenerationDefaults(
    {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}, "a test"
)
GREEDY = GenerationDefaults({"temperature": 0.0, "repetition_penalty": 1.1}, "a test")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_new_tokens": 2048, "typical_p": 0.5, "transformers_version": "5.0"}, {}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "do_sample": True}, {"temperature": 0.6, "top_p": 0.95}),
        ({"top_k": 20, "min_p": 0, "repetition_penalty": 1.05}, {"top_k": 20, "min_p": 0, "repetition_penalty": 1.05}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0, "repetition_penalty": 1.2}),
    ],
)
def test_generation_config_is_read(config: dict[str, Any], values: dict[str, float]) -> None:
    made = defaults_from_config(config)
    assert dict(made.values) == values
    assert made.source == ("generation_config.json" if values else "")


def test_a_gguf_file_is_read_and_its_float32_numbers_are_those_that_were_meant() -> None:
    metadata = {
        "general.sampling.temp": 0.699999988079071,
        "general.sampling.top_p": 0.949999988079071,
        "general.sampling.top_k": 20,
        "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": 1.0499999523162842,
        "general.sampling.mirostat": 0,
    }
    expected = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    assert dict(defaults_from_gguf(metadata).values) == expected
    assert not defaults_from_gguf({"general.name": "silent"})


WRONG: dict[str, list[Any]] = {
    "temperature": ["0.7", True, [], {}, math.nan, math.inf, -0.1, 10**400],
    "top_p": ["x", False, [0.9], math.nan, 0, -1, 1.01, 10**400],
    "top_k": [0.5, 40.0, "40", True, -2, 2**31, 10**400, math.nan],
    "min_p": [None, "0", -0.01, 1.5, math.inf],
    "repetition_penalty": [0, -1, "1", math.nan, -math.inf, 10**400],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values if value is not None],
    ids=str,
)
def test_a_value_that_no_request_could_have_is_refused_by_file_and_key(name: str, value: Any) -> None:
    with pytest.raises(FileFormatError, match=rf"^generation_config.json: {name} must be .*generation_config 'none'"):
        defaults_from_config({name: value})
    with pytest.raises(FileFormatError, match=rf"^GGUF metadata: {GGUF_KEYS[name]} must be .*generation_config 'none'"):
        defaults_from_gguf({GGUF_KEYS[name]: value})


@pytest.mark.parametrize("value", ["false", 0, [], {}])
def test_do_sample_is_true_or_false(value: Any) -> None:
    with pytest.raises(FileFormatError, match=r"^generation_config.json: do_sample must be true or false"):
        defaults_from_config({"do_sample": value})


# -- filling what was left unsaid --------------------------------------------------------------------------------------


def test_what_the_caller_says_stays_and_the_rest_is_recommended() -> None:
    made = RECOMMENDED.params({"temperature": 1.0, "n": 3, "seed": 5})
    assert made == SamplingParams(n=3, seed=5, temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1)
    assert RECOMMENDED.params().temperature == 0.3
    assert NO_DEFAULTS.params() == SamplingParams()
    assert NO_DEFAULTS.params({"n": 2}) == SamplingParams(n=2)


def test_the_number_of_samples_does_not_change_what_is_drawn_from() -> None:
    """Sample 0 of n = 1 is sample 0 of n = 4, with one seed: also where the model says the temperature."""
    assert RECOMMENDED.params({"n": 4}).temperature == RECOMMENDED.params({"n": 1}).temperature == 0.3


def test_a_beam_search_takes_no_recommendation() -> None:
    given: dict[str, Any] = {"strategy": "beam_search", "beam_width": 4, "n": 2}
    for defaults in (RECOMMENDED, GREEDY):
        assert defaults.params(given) == SamplingParams(**given)
        assert not defaults.used(given)


def test_greedy_is_not_told_about_filters_that_do_nothing() -> None:
    assert RECOMMENDED.params({"temperature": 0}) == SamplingParams(temperature=0, repetition_penalty=1.1)
    assert dict(RECOMMENDED.used({"temperature": 0}).values) == {"repetition_penalty": 1.1}


def test_several_samples_are_drawn_where_greedy_is_recommended() -> None:
    assert GREEDY.params({"n": 1}).temperature == 0
    several: list[dict[str, Any]] = [{"n": 4}, {"best_of": 4}, {"n": 2, "strategy": "diverse"}]
    for given in several:
        assert GREEDY.params(given) == SamplingParams(**given, repetition_penalty=1.1)
        assert dict(GREEDY.used(given).values) == {"repetition_penalty": 1.1}


def test_no_request_is_refused_for_what_nobody_asked() -> None:
    choices: dict[str, list[Any]] = {
        "n": [1, 3],
        "best_of": [None, 3],
        "temperature": [None, 0, 1.0, 0.7],
        "strategy": [None, "parallel", "best_of_n", "beam_search", "diverse"],
        "seed": [None, 1],
        "output_kind": ["final_only", "delta"],
        "prompt_logprobs": [None, 0],
        "max_tokens": [0, 16, None],
    }
    asked = 0
    for values in product(*choices.values()):
        given = {
            name: value
            for name, value in zip(choices, values, strict=True)
            if value is not None or name == "max_tokens"
        }
        try:
            SamplingParams(**given)
        except InvalidInputError:
            for defaults in (RECOMMENDED, GREEDY):
                with pytest.raises(InvalidInputError):
                    defaults.params(given)
            continue
        asked += 1
        for defaults in (RECOMMENDED, GREEDY):
            made = defaults.params(given)
            assert all(getattr(made, name) == getattr(SamplingParams(**given), name) for name in given)
    assert asked > 100


def test_it_says_what_is_used_and_where_it_is_from() -> None:
    assert str(RECOMMENDED.used({"top_k": 5, "min_p": 0.1})) == (
        "temperature 0.3, top_p 0.9, repetition_penalty 1.1 (from a test)"
    )


# -- where it comes from, and who uses it ------------------------------------------------------------------------------


def folder_with(tmp_path: Path, content: object) -> str:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    return str(tmp_path)


def test_the_loader_finds_it_beside_the_weights_unless_told_not_to(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"temperature": 0.6})
    assert dict(ModelLoader(ModelConfig(model=folder)).load_generation_defaults().values) == {"temperature": 0.6}
    left_out = ModelLoader(ModelConfig(model=folder, generation_config="none"))
    assert left_out.load_generation_defaults() == NO_DEFAULTS
    (tmp_path / "generation_config.json").unlink()
    assert ModelLoader(ModelConfig(model=folder)).load_generation_defaults() == NO_DEFAULTS


def test_a_wrong_file_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"temperature": math.nan})
    with pytest.raises(FileFormatError, match=r"^generation_config.json: temperature"):
        ModelLoader(ModelConfig(model=folder)).load_generation_defaults()
    assert not ModelLoader(ModelConfig(model=folder, generation_config="none")).load_generation_defaults()


def test_a_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(ModelError, match=r"generation_config.json"):
        ModelLoader(ModelConfig(model=str(tmp_path))).load_generation_defaults()


@pytest.mark.skipif(not embedded.is_cached(), reason="the default model is not in the cache")
def test_the_embedded_model_recommends_what_its_card_says() -> None:
    made = ModelLoader(ModelConfig()).load_generation_defaults()
    assert dict(made.values) == {"temperature": 0.2, "top_p": 0.9}
    assert made.source == "the model card of smollm2-135m"


def test_the_option_has_two_values() -> None:
    with pytest.raises(InvalidInputError, match="generation_config must be one of 'auto', 'none'"):
        ModelConfig(generation_config="vllm")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="generation_config must be 'none' for two models"):
        OptimalSampling("a", "b", generation_config="auto")


@pytest.mark.parametrize(
    "body",
    [
        CompletionRequest.model_validate({"prompt": "a", "top_p": 0.5, "n": 2}),
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "top_p": 0.5, "n": 2}),
        GrowthRequest.model_validate({"prompt": "a", "top_p": 0.5, "n": 2}),
    ],
    ids=lambda body: type(body).__name__,
)
def test_every_route_uses_it(body: Any) -> None:
    params = body.params(RECOMMENDED)
    assert (params.temperature, params.top_p, params.top_k, params.n) == (0.3, 0.5, 40, 2)
    assert body.params(NO_DEFAULTS).temperature == 1
