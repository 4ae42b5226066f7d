"""The divisors of rotary frequencies that a GGUF file carries as a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.errors import UnsupportedModelError
from ramify.models.gguf_architecture import ROPE_FACTORS, architecture_of, shapes_of
from ramify.models.gguf_header import GGUFHeader, TensorInfo

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
