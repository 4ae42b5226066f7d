"""Checkpoint metadata to Architecture: the facts in which families differ, and all that the decoder knows of them.

What the decoder cannot do (sliding windows, experts, other activations or scalings) is refused by name: a model that
runs wrongly is worse than one that does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.models.generation_defaults import CONFIG_FILE
from ramify.models.metadata_reader import MetadataReader
from ramify.models.quantization_config import Quantization, quantization_from_config
from ramify.models.rope_config import RopeConfig
from ramify.models.rope_metadata import rope_from_config, rope_from_gguf, stretched_length
from ramify.validation import shown

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
    quantization: Quantization | None = None  # of a folder; a GGUF file says it tensor by tensor

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

    @property
    def num_weights(self) -> int:
        """Entries of all matrices; norms and biases are too few to matter."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)


def architecture_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Architecture:
    """Reads a Hugging Face config.json, with the field names of transformers 5 or of earlier versions."""
    read = MetadataReader(config, "config.json")
    family = read.one_of("model_type", FAMILIES, "model_type")
    _refuse_foreign_parts(config)
    vocab_size = read.integer("vocab_size")
    hidden_size, num_heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    head_dim = read.integer("head_dim", 128 if family == "qwen3" else hidden_size // max(num_heads, 1))
    attention_bias = read.boolean("attention_bias", False)
    max_positions = read.integer("max_position_embeddings", 0) or None
    rope = rope_from_config(config, max_positions)
    return Architecture(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=stretched_length(rope, max_positions),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias and family != "qwen2",  # Qwen2's biases are fixed, whatever its config says
        mlp_bias=read.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        tie_embeddings=read.boolean("tie_word_embeddings", False),
        dtype=(read.text("dtype", "") or read.text("torch_dtype", "") or "float32").removeprefix("torch."),
        eos_token_ids=_eos_ids(config, vocab_size, "config.json") | _eos_ids(generation or {}, vocab_size, CONFIG_FILE),
        quantization=quantization_from_config(config),
    )


def architecture_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] = ()
) -> Architecture:
    """Reads a GGUF file's metadata; what it does not say (biases, tied embeddings) follows from its tensors."""
    read = MetadataReader(metadata, "GGUF metadata")
    count = read.integer("split.count", 1)
    if count > 1:
        raise UnsupportedModelError(
            f"this file is one of {count} that hold a model together (split.count); merge them into one, for instance "
            "by llama-gguf-split --merge"
        )
    family = read.one_of("general.architecture", FAMILIES, "architecture")
    if read.integer(f"{family}.expert_count", 0):
        raise UnsupportedModelError("mixtures of experts are not supported")
    if read.integer(f"{family}.attention.sliding_window", 0):
        raise UnsupportedModelError("sliding-window attention is not supported")
    hidden_size = read.integer(f"{family}.embedding_length")
    num_heads = read.integer(f"{family}.attention.head_count")
    head_dim = read.integer(f"{family}.attention.key_length", hidden_size // max(num_heads, 1))
    if read.integer(f"{family}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("value heads of another size than key heads are not supported")
    if read.integer(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("partial rotary positions are not supported")
    max_positions = read.integer(f"{family}.context_length", 0) or None
    rope = rope_from_gguf(read, family, max_positions, rope_factors)
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
        max_position_embeddings=stretched_length(rope, max_positions),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        tie_embeddings="output.weight" not in shapes,
        dtype="float16",  # the precision of the quantised weights' scales
    )


def _refuse_foreign_parts(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {shown(config['hidden_act'])} is not supported, only 'silu'")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise FileFormatError(f"config.json: layer_types must be a list, got {shown(layer_types)}")
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModelError("sliding-window attention is not supported")
    if config.get("model_type") == "llama" and config.get("sliding_window"):
        raise UnsupportedModelError("sliding-window attention is not supported")
    if config.get("num_experts") or config.get("num_local_experts"):
        raise UnsupportedModelError("mixtures of experts are not supported")
    if config.get("auto_map"):
        raise UnsupportedModelError("the checkpoint wants to run its own code (auto_map), which Ramify never does")


def _eos_ids(config: Mapping[str, Any], vocab_size: int, where: str) -> frozenset[int]:
    """End tokens; one that the model cannot draw would be looked for in vain, or break a step that masks it."""
    ids = config.get("eos_token_id")
    if ids is None:
        return frozenset()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise FileFormatError(f"{where}: eos_token_id must be a token id or a list of them, got {shown(ids)}")
    outside = next((each for each in listed if not 0 <= each < vocab_size), None)
    if outside is not None:
        raise FileFormatError(
            f"{where}: eos_token_id {shown(outside)} is outside the vocabulary of {vocab_size} tokens"
        )
    return frozenset(listed)
