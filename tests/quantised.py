"""Random weights in every number format, made of bytes: no file, and no quantiser, is needed for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ramify.models.gguf_quants import FORMATS_BY_NAME
from ramify.models.packed_quants import PACKED_FORMATS
from ramify.models.stored import StoredTensor

EVERY_FORMAT = {**FORMATS_BY_NAME, **PACKED_FORMATS}
# Where a block's float16 numbers stand: its scale, and the minimum or the scale of minima.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    **{name: (0,) for name in PACKED_FORMATS if name != "FP8"},
}


def stored(name: str, rows: int, depth: int, seed: int) -> StoredTensor:
    """All other bits are random: every number that a block can hold comes up."""
    quant_format, numbers = EVERY_FORMAT[name], np.random.default_rng(seed)
    if quant_format.block_size == 1:
        weights = torch.from_numpy(numbers.normal(size=(rows, depth)).astype(np.float32))
        return StoredTensor.of(weights.to(quant_format.weights_dtype))
    num_blocks = rows * depth // quant_format.block_size
    blocks = numbers.integers(0, 256, (num_blocks, quant_format.block_bytes), dtype=np.uint8)
    if name.startswith("INT4"):
        blocks[:, 2] &= 15  # a zero point is one of its numbers
    if name == "FP8":
        blocks[(blocks & 0x7F) == 0x7F] = 0  # what is not a number
        blocks[:, :4] = numbers.normal(size=(num_blocks, 1)).astype(np.float32).view(np.uint8)
        return StoredTensor(torch.from_numpy(blocks).flatten(), quant_format, (rows, depth))
    for start in HALVES[name]:
        halves = numbers.normal(size=(num_blocks, 1)).astype(np.float16) / np.float16(100)
        blocks[:, start : start + 2] = halves.view(np.uint8)
    return StoredTensor(torch.from_numpy(blocks).flatten(), quant_format, (rows, depth))


def write_model(path: Path, names: Sequence[str], *, seed: int = 0, tied: bool = False) -> None:
    """A GGUF file of a small Llama; its matrices take turns in these formats."""
    import gguf  # only files need it: bytes are made without

    hidden, inner, heads, kv_heads, vocabulary, layers = 256, 512, 4, 2, 320, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    # A vocabulary only as large as the format asks for: prompts are token ids.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, vocabulary))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["a b"])
    key_rows = hidden // heads * kv_heads
    shapes = {"token_embd": (vocabulary, hidden), **({} if tied else {"output": (vocabulary, hidden)})}
    for layer in range(layers):
        parts = {
            "attn_q": (hidden, hidden),
            "attn_k": (key_rows, hidden),
            "attn_v": (key_rows, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.full(hidden, 0.3, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.full(hidden, 0.3, dtype=np.float32))
    for index, (part, shape) in enumerate(shapes.items()):
        name = names[index % len(names)]
        weight = stored(name, *shape, seed=seed + index)
        writer.add_tensor(f"{part}.weight", weight.rows().numpy(), raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
