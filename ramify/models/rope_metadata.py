"""Checkpoint metadata to RopeConfig; a scaling that `rope` does not know is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.models.metadata_reader import LARGEST_INTEGER, MetadataReader
from ramify.models.rope_config import RopeConfig, yarn_attention_factor
from ramify.validation import shown

# Far beyond every checkpoint, and small enough that no step of `rope` leaves a float's range.
LARGEST_FACTOR = 1e6
SMALLEST_ROTATIONS = 1e-6  # yarn divides by its betas


def rope_from_config(config: Mapping[str, Any], max_positions: int | None) -> RopeConfig:
    """transformers 5 writes rope_parameters, earlier versions rope_scaling and a rope_theta beside it."""
    top = MetadataReader(config, "config.json")
    old, new = top.mapping("rope_scaling"), top.mapping("rope_parameters")
    rope = _rope_of(old or new, top, max_positions)
    if old and new and _rope_of(new, top, max_positions) != rope:
        raise FileFormatError("config.json: rope_scaling and rope_parameters say different things; keep one of them")
    return rope


def _rope_of(parameters: Mapping[str, Any], top: MetadataReader, max_positions: int | None) -> RopeConfig:
    read = MetadataReader(parameters, "config.json rope parameters")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("rotary positions that differ between kinds of layers are not supported")
    theta = _theta(read.number("rope_theta", top.number("rope_theta", 10_000.0)), "config.json: rope_theta")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if read.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial rotary positions are not supported")
    if parameters.get("mrope_section"):
        raise UnsupportedModelError("multimodal rotary positions (mrope) are not supported")
    if kind == "default":
        return RopeConfig(theta)
    original = read.integer("original_max_position_embeddings", max_positions or 0)
    original = top.integer("original_max_position_embeddings", original)  # which decides, as in transformers
    if kind == "linear":
        return RopeConfig(theta, "linear", _factor(read, "factor"))
    if kind == "llama3":
        low = read.number("low_freq_factor", high=LARGEST_FACTOR)
        high = read.number("high_freq_factor", high=LARGEST_FACTOR)
        if high <= low:
            raise FileFormatError(f"{read.where}: high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeConfig(
            theta, "llama3", _factor(read, "factor"), original, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        if original == 0:
            raise FileFormatError("config.json: yarn needs original_max_position_embeddings")
        factor = _factor(read, "factor", None if max_positions is None else max_positions / original)
        scales = [read.number(name, 0.0, high=LARGEST_FACTOR) for name in ("mscale", "mscale_all_dim")]
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=_beta(read, "beta_fast", 32.0),
            beta_slow=_beta(read, "beta_slow", 1.0),
            attention_factor=read.number(
                "attention_factor", yarn_attention_factor(factor, *scales), high=LARGEST_FACTOR
            ),
            truncate=read.boolean("truncate", True),
        )
    raise UnsupportedModelError(f"rope scaling {shown(kind)} is not supported; known: default, linear, llama3, yarn")


def rope_from_gguf(
    read: MetadataReader, family: str, max_positions: int | None, factors: tuple[float, ...]
) -> RopeConfig:
    theta = _theta(read.number(f"{family}.rope.freq_base", 10_000.0), "GGUF metadata: rope.freq_base")
    if not all(1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR for factor in factors):
        raise FileFormatError("GGUF metadata: rope_freqs.weight must hold positive numbers")
    scaling = f"{family}.rope.scaling"
    # Files from before there was a type say it as rope.scale_linear; without a type a factor is a linear one.
    factor_name = next(
        (each for each in (f"{scaling}.factor", f"{family}.rope.scale_linear") if each in read.values), ""
    )
    kind = read.text(f"{scaling}.type", "linear" if factor_name and read.number(factor_name) not in (0, 1) else "none")
    for name in ("attn_factor", "yarn_attn_factor"):
        if read.number(f"{scaling}.{name}", 1.0) != 1:
            raise UnsupportedModelError(f"rope.scaling.{name} is not supported")
    if kind == "none":
        return RopeConfig(theta, "factors", factors=factors) if factors else RopeConfig(theta)
    if factors:
        raise UnsupportedModelError(f"rope_freqs.weight beside rope scaling {shown(kind)} is not supported")
    factor = _factor(read, factor_name or f"{scaling}.factor")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        return _yarn_from_gguf(read, scaling, RopeConfig(theta, "yarn", factor), max_positions)
    raise UnsupportedModelError(f"rope scaling {shown(kind)} is not supported; known: none, linear, yarn")


def _yarn_from_gguf(read: MetadataReader, scaling: str, rope: RopeConfig, max_positions: int | None) -> RopeConfig:
    original = read.integer(f"{scaling}.original_context_length", max_positions or 0)
    if original == 0:
        raise FileFormatError("GGUF metadata: yarn needs rope.scaling.original_context_length")
    if read.number(f"{scaling}.yarn_ext_factor", 1.0, low=-1.0) not in (1, -1):  # -1: as ever
        raise UnsupportedModelError("rope.scaling.yarn_ext_factor is not supported")
    if read.number(f"{scaling}.yarn_log_multiplier", 0.0, low=-LARGEST_FACTOR) != 0:
        raise UnsupportedModelError("rope.scaling.yarn_log_multiplier is not supported")
    return replace(
        rope,
        original_max_position_embeddings=original,
        beta_fast=_beta(read, f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=_beta(read, f"{scaling}.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(rope.factor, None, None),
    )


def stretched_length(rope: RopeConfig, max_positions: int | None) -> int | None:
    """The longest context that the checkpoint serves: linear and yarn scaling stretch the one it was trained on."""
    if max_positions is None:
        return None
    longest = max_positions
    if rope.kind == "linear":
        longest = int(max_positions * rope.factor)
    elif rope.kind == "yarn":
        longest = max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return min(longest, LARGEST_INTEGER)


def _theta(theta: float, name: str) -> float:
    if theta <= 1:
        raise FileFormatError(f"{name} must be above 1, got {theta}")
    return theta


def _beta(read: MetadataReader, name: str, default: float) -> float:
    return read.number(name, default, low=SMALLEST_ROTATIONS, high=LARGEST_FACTOR)


def _factor(read: MetadataReader, name: str, default: float | None = None) -> float:
    factor = read.number(name, default, high=LARGEST_FACTOR)
    if factor < 1:
        raise FileFormatError(f"{read.where}: {name} must be at least 1, got {factor}")
    return factor
