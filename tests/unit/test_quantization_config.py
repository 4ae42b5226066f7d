"""quantization_config: what is served is read, and anything else is refused by its name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from ramify import FileFormatError, UnsupportedModelError
from ramify.errors import ModelError
from ramify.models.quantization_config import Quantization, quantization_from_config

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (GPTQ, Quantization("gptq", 4, 128, symmetric=True, zeros_are_one_less=True)),
        (GPTQ | {"bits": 8, "group_size": -1, "sym": False}, Quantization("gptq", 8, -1, zeros_are_one_less=True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, Quantization("gptq", 4, 128, symmetric=True)),
        (GPTQ | {"format": "GPTQ_V2", "checkpoint_format": None}, Quantization("gptq", 4, 128, symmetric=True)),
        (
            GPTQ | {"desc_act": True, "damp_percent": 0.1, "meta": {"quantizer": ["x:1"]}, "pack_dtype": "int32"},
            Quantization("gptq", 4, 128, symmetric=True, zeros_are_one_less=True),
        ),
        (AWQ | {"version": "GEMM", "zero_point": True, "modules_to_not_convert": ["x"]}, Quantization("awq", 4, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization("awq", 4, 64)),
        (FP8 | {"fmt": "e4m3", "activation_scheme": "dynamic"}, Quantization("fp8", 8, 128, symmetric=True)),
        (
            FP8 | {"scale_fmt": "float", "expert_dtype": "fp8", "dequantize": False, "modules_to_convert": None},
            Quantization("fp8", 8, 128, symmetric=True),
        ),
        (GPTQ | {"something_new": False, "or_this": []}, Quantization("gptq", 4, 128, True, True)),
    ],
)
def test_what_is_served(options: dict[str, Any], expected: Quantization) -> None:
    assert quantization_from_config({"quantization_config": options}) == expected
    assert expected.label


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_what_is_not_quantised(config: dict[str, Any]) -> None:
    assert quantization_from_config(config) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 4}, ["'an unnamed method'", "gptq, awq, fp8"]),
        ({"quant_method": "bitsandbytes"}, ["'bitsandbytes'", "gptq, awq, fp8 and GGUF"]),
        ({"quant_method": "compressed-tensors"}, ["'compressed-tensors'"]),
        ({"quant_method": ["gptq"]}, ["['gptq']"]),
        (GPTQ | {"bits": 3}, ["gptq", "bits 3", "4 and 8"]),
        (GPTQ | {"bits": True}, ["bits True", "4 and 8"]),
        (GPTQ | {"bits": "4"}, ["bits '4'"]),
        (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format 'marlin'", "gptq and gptq_v2"]),
        (GPTQ | {"is_marlin_format": True}, ["marlin"]),
        (GPTQ | {"pack_dtype": "int64"}, ["pack_dtype 'int64'", "int32"]),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, ["dynamic"]),
        (GPTQ | {"rotation": "hadamard"}, ["'rotation'", "checkpoint_format"]),
        (AWQ | {"bits": 8}, ["awq", "bits 8", "4"]),
        (AWQ | {"version": "gemv"}, ["version 'gemv'", "gemm"]),
        (AWQ | {"zero_point": False}, ["zero_point"]),
        (FP8 | {"weight_block_size": None}, ["weight_block_size None", "[128, 128]"]),
        (FP8 | {"weight_block_size": [64, 128]}, ["[64, 128]"]),
        (FP8 | {"fmt": "e5m2"}, ["'e5m2'", "e4m3"]),
        (FP8 | {"activation_scheme": "static"}, ["'static'", "dynamic"]),
        (FP8 | {"scale_fmt": "ue8m0"}, ["scale_fmt 'ue8m0'", "float"]),
        (FP8 | {"modules_to_convert": ["model.embed_tokens"]}, ["'modules_to_convert'"]),
    ],
)
def test_what_is_refused_by_name(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        quantization_from_config({"quantization_config": options})
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize("value", [0, 4, -2, 1.5, True, "128", None, [128], 2**40])
def test_group_sizes_that_are_none(value: object) -> None:
    with pytest.raises(FileFormatError, match="group_size must be -1 or a whole number in 8"):
        quantization_from_config({"quantization_config": GPTQ | {"group_size": value}})


@pytest.mark.parametrize("name", ["sym", "is_marlin_format", "checkpoint_format", "bits", "weight_block_size", "fmt"])
def test_strange_values_are_refused_or_read(name: str) -> None:
    """What asks for nothing is read; nothing else than an error of ours comes up, however long the value."""
    values: tuple[Any, ...] = ({}, [1], "x" * 5000, 1e400, -1, 10**5000)
    for value in values:
        for options in (GPTQ, AWQ, FP8):
            with suppress(ModelError):
                assert quantization_from_config({"quantization_config": options | {name: value}}) is not None
