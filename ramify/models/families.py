"""Checkpoint metadata to Architecture: the facts in which families differ, and all that the decoder knows of them.

What the decoder cannot do (sliding windows, experts, other activations or scalings) is refused by name: a model that
runs wrongly is worse than one that does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.models.rope import RopeConfig, yarn_attention_factor

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything the decoder needs to know about a checkpoint."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "hidden_size",
            "intermediate_size",
            "vocab_size",
        ):
            if not 1 <= getattr(self, name) < 2**31:
                raise FileFormatError(f"{name} must be a positive number, got {getattr(self, name)}")
        if not 1 <= self.num_layers < 2**16:
            raise FileFormatError(f"the number of layers must be positive, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise FileFormatError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2 or self.head_dim > 4096:
            raise FileFormatError(f"head_dim must be even and at most 4096, got {self.head_dim}")


def architecture_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Architecture:
    """Reads a Hugging Face config.json, with the field names of transformers 5 or of earlier versions."""
    read = _Reader(config, "config.json")
    family = read.one_of("model_type", FAMILIES, "model_type")
    _refuse_foreign_parts(config)
    hidden_size, num_heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    head_dim = read.integer("head_dim", 128 if family == "qwen3" else hidden_size // max(num_heads, 1))
    attention_bias = read.boolean("attention_bias", False)
    max_positions = read.integer("max_position_embeddings", 0) or None
    rope = _rope_from_config(config, max_positions)
    return Architecture(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=_stretched_length(rope, max_positions),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias and family != "qwen2",  # Qwen2's biases are fixed, whatever its config says
        mlp_bias=read.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        tie_embeddings=read.boolean("tie_word_embeddings", False),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_eos_ids(config) | _eos_ids(generation or {}),
    )


def architecture_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] = ()
) -> Architecture:
    """Reads a GGUF file's metadata; what it does not say (biases, tied embeddings) follows from its tensors."""
    read = _Reader(metadata, "GGUF metadata")
    family = read.one_of("general.architecture", FAMILIES, "architecture")
    if metadata.get(f"{family}.expert_count"):
        raise UnsupportedModelError("mixtures of experts are not supported")
    if metadata.get(f"{family}.attention.sliding_window"):
        raise UnsupportedModelError("sliding-window attention is not supported")
    hidden_size = read.integer(f"{family}.embedding_length")
    num_heads = read.integer(f"{family}.attention.head_count")
    head_dim = read.integer(f"{family}.attention.key_length", hidden_size // max(num_heads, 1))
    if read.integer(f"{family}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("value heads of another size than key heads are not supported")
    if read.integer(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("partial rotary positions are not supported")
    max_positions = read.integer(f"{family}.context_length", 0) or None
    rope = _rope_from_gguf(read, family, max_positions, rope_factors)
    if rope.kind == "factors" and len(rope.factors) != head_dim // 2:
        raise FileFormatError(f"rope_freqs.weight must have {head_dim // 2} entries, got {len(rope.factors)}")
    if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
        raise FileFormatError("GGUF file has no two-dimensional token_embd.weight")
    return Architecture(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=read.integer(f"{family}.feed_forward_length"),
        num_layers=read.integer(f"{family}.block_count"),
        num_heads=num_heads,
        num_kv_heads=read.integer(f"{family}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number(f"{family}.attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        max_position_embeddings=_stretched_length(rope, max_positions),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        tie_embeddings="output.weight" not in shapes,
        dtype="float16",  # the precision of the quantised weights' scales
    )


class _Reader:
    """Typed look-ups, whose errors name the field that is missing or has the wrong type."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise FileFormatError(f"{self.where}: {name} must be a whole number, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise FileFormatError(f"{self.where}: {name} must be a number >= 0, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FileFormatError(f"{self.where}: {name} must be true or false, got {value!r}")
        return value

    def one_of(self, name: str, known: tuple[str, ...], what: str) -> str:
        value = self.values.get(name)
        if value not in known:
            raise UnsupportedModelError(f"{what} {value!r} is not supported; known: {', '.join(known)}")
        return str(value)


def _refuse_foreign_parts(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedModelError("sliding-window attention is not supported")
    if config.get("model_type") == "llama" and config.get("sliding_window"):
        raise UnsupportedModelError("sliding-window attention is not supported")
    if config.get("num_experts") or config.get("num_local_experts"):
        raise UnsupportedModelError("mixtures of experts are not supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantised checkpoints ({method}) are not supported; GGUF files are")
    if config.get("auto_map"):
        raise UnsupportedModelError("the checkpoint wants to run its own code (auto_map), which Ramify never does")


def _rope_from_config(config: Mapping[str, Any], max_positions: int | None) -> RopeConfig:
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    read = _Reader(parameters, "config.json rope parameters")
    top = _Reader(config, "config.json")
    theta = read.number("rope_theta", top.number("rope_theta", 10_000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if read.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial rotary positions are not supported")
    if parameters.get("mrope_section"):
        raise UnsupportedModelError("multimodal rotary positions (mrope) are not supported")
    if theta <= 1:
        raise FileFormatError(f"config.json: rope_theta must be above 1, got {theta}")
    if kind == "default":
        return RopeConfig(theta)
    original = read.integer("original_max_position_embeddings", max_positions or 0)
    if kind == "linear":
        return RopeConfig(theta, "linear", _factor(read))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            _factor(read),
            original,
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
        )
    if kind == "yarn":
        if original == 0:
            raise FileFormatError("config.json: yarn needs original_max_position_embeddings")
        factor = _factor(read, None if max_positions is None else max_positions / original)
        inferred = yarn_attention_factor(factor, parameters.get("mscale"), parameters.get("mscale_all_dim"))
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=read.number("beta_fast", 32.0),
            beta_slow=read.number("beta_slow", 1.0),
            attention_factor=read.number("attention_factor", inferred),
            truncate=read.boolean("truncate", True),
        )
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3, yarn")


def _rope_from_gguf(read: _Reader, family: str, max_positions: int | None, factors: tuple[float, ...]) -> RopeConfig:
    theta = read.number(f"{family}.rope.freq_base", 10_000.0)
    if theta <= 1:
        raise FileFormatError(f"GGUF metadata: rope.freq_base must be above 1, got {theta}")
    kind = read.values.get(f"{family}.rope.scaling.type", "none")
    if kind in ("none", None):
        return RopeConfig(theta, "factors", factors=factors) if factors else RopeConfig(theta)
    factor = read.number(f"{family}.rope.scaling.factor")
    if factor < 1:
        raise FileFormatError(f"GGUF metadata: rope.scaling.factor must be at least 1, got {factor}")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        original = read.integer(f"{family}.rope.scaling.original_context_length", max_positions or 0)
        if original == 0:
            raise FileFormatError("GGUF metadata: yarn needs rope.scaling.original_context_length")
        return RopeConfig(theta, "yarn", factor, original, attention_factor=yarn_attention_factor(factor, None, None))
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; known: none, linear, yarn")


def _factor(read: _Reader, default: float | None = None) -> float:
    factor = read.number("factor", default)
    if factor < 1:
        raise FileFormatError(f"{read.where}: factor must be at least 1, got {factor}")
    return factor


def _stretched_length(rope: RopeConfig, max_positions: int | None) -> int | None:
    """The longest context that the checkpoint serves: linear and yarn scaling stretch the one it was trained on."""
    if max_positions is None:
        return None
    if rope.kind == "linear":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return max_positions


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    ids = config.get("eos_token_id")
    if ids is None:
        return frozenset()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in listed):
        raise FileFormatError(f"eos_token_id must be a token id or a list of them, got {ids!r}")
    return frozenset(listed)
