"""What a GGUF file's header says of rotary positions: as metadata, and as a tensor of divisors; and split files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.models.families import architecture_from_gguf
from ramify.models.gguf_architecture import ROPE_FACTORS, architecture_of, shapes_of
from ramify.models.gguf_header import GGUFHeader, TensorInfo
from ramify.models.rope_config import RopeConfig, yarn_attention_factor

FACTORS = [1.0, 1.5, 8.0, 0.25]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.context_length": 64,
}


def header(quantization: str, stored: bytes) -> GGUFHeader:
    before = b"?" * 64
    tensors = {
        "token_embd.weight": TensorInfo("token_embd.weight", (10, 16), "F32", 0, 640),
        ROPE_FACTORS: TensorInfo(ROPE_FACTORS, (len(FACTORS),), quantization, len(before), len(stored)),
    }
    return GGUFHeader(Path("model.gguf"), before + stored, METADATA, tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        ("F32", np.array(FACTORS, "<f4").tobytes()),
        ("F16", np.array(FACTORS, "<f2").tobytes()),
        ("BF16", (np.array(FACTORS, "<f4").view("<u4") >> 16).astype("<u2").tobytes()),
    ],
)
def test_they_are_read_as_they_are_stored(quantization: str, stored: bytes) -> None:
    found = header(quantization, stored)
    assert architecture_of(found).rope.factors == tuple(FACTORS)
    assert shapes_of(found) == {"token_embd.weight": (10, 16)}, "they are no weights"


def test_quantised_ones_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight is stored in Q8_0: F32, F16, BF16 are read"):
        architecture_of(header("Q8_0", bytes(34)))


SHAPES = {"token_embd.weight": (10, 16)}
YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}


def rope_of(rope: dict[str, Any], factors: tuple[float, ...] = ()) -> RopeConfig:
    return architecture_from_gguf(
        {**METADATA, **{f"llama.rope.{name}": value for name, value in rope.items()}}, SHAPES, factors
    ).rope


@pytest.mark.parametrize(
    "said",
    [{"scale_linear": 8.0}, {"scaling.factor": 8.0}, {"scaling.type": "linear", "scale_linear": 8.0}],
)
def test_a_factor_without_a_type_is_linear(said: dict[str, Any]) -> None:
    """As in llama.cpp: files from before there was a type say no more. They ran unscaled once, with wrong positions."""
    assert rope_of(said) == RopeConfig(kind="linear", factor=8.0)


@pytest.mark.parametrize(
    "said",
    [{}, {"scale_linear": 1.0}, {"scaling.factor": 0.0}, {"scaling.type": "none", "scaling.factor": 8.0}],
)
def test_what_asks_for_no_scaling(said: dict[str, Any]) -> None:
    assert rope_of({**said, "scaling.attn_factor": 1.0}) == RopeConfig()


def test_all_that_yarn_says_is_read() -> None:
    betas = {"scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0, "scaling.yarn_ext_factor": 1.0}
    assert rope_of({**YARN, **betas}) == RopeConfig(
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=32,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=yarn_attention_factor(4.0, None, None),
    )


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"])
def test_scalings_that_are_not_computed_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"rope\.scaling\.{name} is not supported"):
        rope_of({**YARN, f"scaling.{name}": 0.5})


@pytest.mark.parametrize("said", [YARN, {"scale_linear": 2.0}])
def test_divisors_beside_a_scaling_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight beside rope scaling"):
        rope_of(said, tuple(FACTORS))


def test_a_part_of_a_split_model_is_refused_as_such() -> None:
    for metadata in ({**METADATA, "split.count": 3}, {"split.count": 3, "split.no": 1}):
        with pytest.raises(UnsupportedModelError, match=r"one of 3 that hold a model together \(split\.count\); merge"):
            architecture_from_gguf(metadata, SHAPES)
    assert architecture_from_gguf({**METADATA, "split.count": 1}, SHAPES).num_layers == 1
    with pytest.raises(FileFormatError, match=r"split\.count must be a whole number"):
        architecture_from_gguf({**METADATA, "split.count": "3"}, SHAPES)
