"""Engine options: the documents' names and defaults, refusals by name, and sizes resolved once."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.config import (
    DEFAULT_MODEL,
    CacheConfig,
    EngineConfig,
    EngineOptions,
    ModelConfig,
    ModelDType,
    SchedulerConfig,
)
from ramify.errors import InvalidInputError

PARTS: dict[str, Any] = {
    "model_config": ModelConfig,
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
}
OWNERS = {each.name: kind for kind in PARTS.values() for each in fields(kind)}


def test_every_option_has_its_documented_default() -> None:
    documented: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "tokenizer": None,
        "dtype": "auto",
        "device": "auto",
        "max_model_len": None,
        "load_format": "auto",
        "max_logprobs": 20,
        "logprobs_mode": "raw",
        "warmup": "lazy",
        "enforce_eager": False,
        "dequantize": False,
        "int8_activations": False,
        "batch_invariant": False,
        "generation_config": "auto",
        "tensor_parallel_size": 1,
        "speculation": None,
        "data_parallel_size": 1,
        "seed": 0,
        "block_size": 16,
        "num_kv_blocks": None,
        "gpu_memory_utilization": 0.9,
        "swap_space": 4,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": None,
        "max_num_seqs": 256,
        "enable_chunked_prefill": True,
        "preemption_mode": "recompute",
    }
    config = EngineConfig()
    options = {each.name: getattr(getattr(config, name), each.name) for name in PARTS for each in fields(PARTS[name])}
    assert options == documented
    assert DEFAULT_MODEL == "smollm2-135m"


def test_the_dtypes_are_the_documents_names() -> None:
    assert get_args(ModelDType) == ("auto", "half", "float16", "bfloat16", "float", "float32")
    for dtype in get_args(ModelDType):
        assert ModelConfig(dtype=dtype).dtype == dtype


def test_every_option_has_a_help_text() -> None:
    assert [each.name for kind in PARTS.values() for each in fields(kind) if not each.metadata.get("help")] == []


def test_the_typed_options_are_all_fields_of_the_parts_but_the_model() -> None:
    names = [each.name for kind in PARTS.values() for each in fields(kind)]
    assert len(set(names)) == len(names), "two parts share an option's name"
    assert set(EngineOptions.__annotations__) == set(names) - {"model"}
    assert EngineOptions.__required_keys__ == frozenset()


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("model", "", "non-empty"),
        ("model", None, "string"),
        ("tokenizer", "", "non-empty"),
        ("tokenizer", 3, "string"),
        ("dtype", "int8", "'bfloat16'"),
        ("dtype", "FLOAT32", "'float32'"),
        ("dtype", None, "'auto'"),
        ("device", "gpu", "'cuda'"),
        ("device", "cuda:", "'cuda:N'"),
        ("device", "cuda:-1", "'cuda:N'"),
        ("device", "cuda:one", "'cuda:N'"),
        ("device", "cpu:0", "'cpu'"),
        ("device", 0, "'cpu'"),
        ("max_model_len", 0, "1..16777216"),
        ("max_model_len", 2**24 + 1, "1..16777216"),
        ("max_model_len", True, "integer"),
        ("max_model_len", 2048.0, "integer"),
        ("load_format", "pickle", "'safetensors'"),
        ("max_logprobs", -1, ">= 0"),
        ("logprobs_mode", "neither", "'processed'"),
        ("enforce_eager", 1, "True or False"),
        ("dequantize", "yes", "True or False"),
        ("int8_activations", 8, "True or False"),
        ("batch_invariant", 1, "True or False"),
        ("seed", 2**64, str(2**64 - 1)),
        ("seed", -(2**63) - 1, str(-(2**63))),
        ("block_size", 0, "1..1024"),
        ("block_size", 1025, "1..1024"),
        ("block_size", True, "integer"),
        ("block_size", "16", "integer"),
        ("num_kv_blocks", 0, ">= 1"),
        ("num_kv_blocks", 1.5, "integer"),
        ("gpu_memory_utilization", 0, "above 0 and at most 1"),
        ("gpu_memory_utilization", -0.1, "above 0 and at most 1"),
        ("gpu_memory_utilization", 1.1, "above 0 and at most 1"),
        ("gpu_memory_utilization", math.nan, "finite"),
        ("gpu_memory_utilization", True, "finite number"),
        ("swap_space", -1, ">= 0"),
        ("swap_space", math.inf, "finite"),
        ("swap_space", "4", "finite number"),
        ("enable_prefix_caching", "yes", "True or False"),
        ("max_num_batched_tokens", 0, ">= 1"),
        ("max_num_batched_tokens", 2048.0, "integer"),
        ("max_num_seqs", 0, ">= 1"),
        ("preemption_mode", "drop", "'recompute'"),
    ],
)
def test_a_bad_value_is_refused_naming_field_range_and_value(field: str, value: object, allowed: str) -> None:
    for make in (OWNERS[field], EngineConfig.from_options):
        with pytest.raises(InvalidInputError, match=rf"^{field} must be ") as caught:
            make(**{field: value})
        assert isinstance(caught.value, ValueError)
        assert allowed in str(caught.value)
        assert repr(value) in str(caught.value)


def test_a_device_number_is_written_in_ascii_digits() -> None:
    # torch reads no other digits: what is accepted here must not fail there.
    with pytest.raises(InvalidInputError, match=r"^device must be "):
        ModelConfig(device="cuda:\N{ARABIC-INDIC DIGIT THREE}")


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {"device": "cuda"},
        {"device": "cuda:0"},
        {"device": "cuda:11"},
        {"max_model_len": 1},
        {"max_model_len": 2**24},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"block_size": 1},
        {"block_size": 1024},
        {"num_kv_blocks": 1},
        {"gpu_memory_utilization": 1},
        {"gpu_memory_utilization": 5e-324},
        {"swap_space": 0},
        {"max_logprobs": 0},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"preemption_mode": "swap"},
        {"load_format": "dummy"},
        {"logprobs_mode": "processed"},
    ],
    ids=str,
)
def test_a_value_at_the_end_of_its_range_is_accepted(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    assert getattr(OWNERS[name](**options), name) == value


@pytest.mark.parametrize("name", ["blocksize", "temperature", "model_config", ""])
def test_an_unknown_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name!r} is not an engine option") as caught:
        EngineConfig.from_options(block_size=16, **{name: 1})
    assert "gpu_memory_utilization" in str(caught.value), "the options that exist are listed"


@pytest.mark.parametrize("kind", list(PARTS.values()))
def test_an_unknown_field_of_a_part_is_a_type_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="blocksize"):
        kind(blocksize=16)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("value", [None, {}, EngineConfig()], ids=["None", "dict", "EngineConfig"])
def test_a_part_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{name} must be a {PARTS[name].__name__}\b"):
        EngineConfig(**{name: value})


def test_flat_options_reach_their_parts_and_leave_the_others_at_their_defaults() -> None:
    config = EngineConfig.from_options(model="somewhere", dtype="half", block_size=8, max_num_seqs=3)
    assert config == EngineConfig(
        ModelConfig(model="somewhere", dtype="half"), CacheConfig(block_size=8), SchedulerConfig(max_num_seqs=3)
    )


# -- frozen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", OWNERS)
def test_no_option_can_be_assigned(field: str) -> None:
    part = OWNERS[field]()
    with pytest.raises(FrozenInstanceError):
        setattr(part, field, getattr(part, field))


@pytest.mark.parametrize("name", PARTS)
def test_no_part_can_be_exchanged(name: str) -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, PARTS[name]())


# -- resolved once -------------------------------------------------------------------------------------------

lengths = st.integers(1, 2**24)


@settings(deadline=None)
@given(user=st.none() | lengths, checkpoint=st.none() | lengths)
def test_the_context_is_the_users_then_the_checkpoints_then_2048(user: int | None, checkpoint: int | None) -> None:
    config = ModelConfig(max_model_len=user)
    if user is not None and checkpoint is not None and user > checkpoint:
        with pytest.raises(InvalidInputError, match=rf"^max_model_len must be at most {checkpoint} .* got {user}$"):
            config.resolve_max_model_len(checkpoint)
    else:
        expected = next((length for length in (user, checkpoint) if length is not None), 2048)
        assert config.resolve_max_model_len(checkpoint) == expected
    assert config.max_model_len == user, "nothing is written back"


@settings(deadline=None)
@given(user=st.none() | st.integers(1, 10**6), max_num_seqs=st.integers(1, 10**5), on_gpu=st.booleans())
def test_the_budget_of_a_step_is_the_users_or_large_enough_for_every_sequence(
    user: int | None, max_num_seqs: int, on_gpu: bool
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=user, max_num_seqs=max_num_seqs)
    resolved = config.resolve_max_num_batched_tokens(on_gpu=on_gpu)
    assert resolved == (user if user is not None else max(8192 if on_gpu else 2048, max_num_seqs))


def test_the_budget_of_a_step_defaults_to_2048_and_to_8192_on_a_gpu() -> None:
    assert SchedulerConfig().resolve_max_num_batched_tokens(on_gpu=False) == 2048
    assert SchedulerConfig().resolve_max_num_batched_tokens(on_gpu=True) == 8192
    assert SchedulerConfig(max_num_seqs=3000).resolve_max_num_batched_tokens(on_gpu=False) == 3000


def test_the_budget_of_a_step_may_be_smaller_than_the_number_of_sequences() -> None:
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=256)
    assert config.resolve_max_num_batched_tokens(on_gpu=False) == 8
