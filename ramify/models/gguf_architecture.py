"""From the header of a GGUF file to an Architecture: without weights and without torch."""

from __future__ import annotations

import numpy as np

from ramify.errors import UnsupportedModelError
from ramify.models.families import Architecture, architecture_from_gguf
from ramify.models.gguf_header import GGUFHeader, TensorInfo

ROPE_FACTORS = "rope_freqs.weight"
MOST_FACTORS = 4096
WORDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def shapes_of(header: GGUFHeader) -> dict[str, tuple[int, ...]]:
    """Of every tensor of weights, by GGUF's names: the divisors of rotary frequencies are none."""
    return {name: info.shape for name, info in header.tensors.items() if not _are_factors(info)}


def architecture_of(header: GGUFHeader) -> Architecture:
    info = header.tensors.get(ROPE_FACTORS)
    factors = _numbers(header, info) if info is not None and _are_factors(info) else ()
    return architecture_from_gguf(header.metadata, shapes_of(header), factors)


def _are_factors(info: TensorInfo) -> bool:
    return info.name == ROPE_FACTORS and len(info.shape) == 1 and info.shape[0] <= MOST_FACTORS


def _numbers(header: GGUFHeader, info: TensorInfo) -> tuple[float, ...]:
    """Of a tensor of floating-point numbers."""
    words = WORDS.get(info.quantization)
    if words is None:
        raise UnsupportedModelError(f"{info.name} is stored in {info.quantization}: {', '.join(WORDS)} are read")
    read = np.frombuffer(header.contents, words, count=info.shape[0], offset=info.offset)
    if info.quantization == "BF16":  # the upper half of a float32
        read = (read.astype("<u4") << 16).view("<f4")
    return tuple(read.astype(float).tolist())
