"""Every family through a GGUF file: a checkpoint rewritten under GGUF's names and row order runs the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ramify import LLM, SamplingParams
from ramify.models.gguf_checkpoint import PER_LAYER, WHOLE_MODEL
from tests.conftest import CheckpointMaker
from tests.equal import check_greedy

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_gguf(
    folder: Path, path: Path, config: Any, matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> None:
    """What a converter does: GGUF's names, Llama's rotary pairs as neighbours, llama3 scaling as divisors."""
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if family != "qwen2" else config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    names = {hf: stored for stored, hf in WHOLE_MODEL.items()}
    parts = {hf: stored for stored, hf in PER_LAYER.items()}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        if stem in names:
            stored = names[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{parts[part]}"
        weights = tensor.float().numpy()
        if family == "llama" and part_is(stem, "q_proj"):
            weights = neighbours(weights, config.num_attention_heads)
        if family == "llama" and part_is(stem, "k_proj"):
            weights = neighbours(weights, config.num_key_value_heads)
        weights = np.ascontiguousarray(weights)
        if weights.ndim == 2 and matrices is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{stored}.{kind}", gguf.quants.quantize(weights, matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(f"{stored}.{kind}", weights)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config.head_dim))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    # A vocabulary only as large as the format asks for: prompts here are token ids.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, config.vocab_size))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part_is(stem: str, part: str) -> bool:
    return stem.endswith(part)


def neighbours(weights: Any, heads: int) -> Any:
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> Any:
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * index / head_dim)
        num_rotations = rope["original_max_position_embeddings"] / wavelength
        if num_rotations > rope["high_freq_factor"]:
            divisors.append(1.0)
        elif num_rotations < rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            blend = (num_rotations - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - blend) / rope["factor"] + blend))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
        ("qwen2", {"tie_word_embeddings": True}),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("qwen3", {}),
    ],
)
def test_a_checkpoint_rewritten_as_gguf_runs_the_same(
    family: str, changes: dict[str, Any], make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, **changes)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, reference.config)
    prompts = [[5, 6, 7], list(range(200)), [319] * 40]
    outputs = LLM(str(path)).generate(
        prompts, SamplingParams(temperature=0, max_tokens=32, detokenize=False), use_tqdm=False
    )
    report = check_greedy(reference, prompts, [output.outputs[0].token_ids for output in outputs])
    assert report.near_ties == 0
