"""A GGUF file of random Q4_K weights in the shape of a 1B model, with the embedded model's tokenizer.

    python bench/random_gguf.py FILE

Engines that read GGUF files are compared on it (`bench/offline.py --gguf FILE`): 1.07 billion weights, 0.6 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ramify.models import embedded
from ramify.models.gguf_header import GGUFHeader

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 2048, 8192, 16, 32, 8
BLOCK, BLOCK_BYTES = 256, 144
SCALE = 1.3e-4  # times factors of six bits and numbers of four: weights of the usual size
TOKENIZER = "tokenizer.ggml."


def blocks(numbers: np.random.Generator, rows: int, depth: int) -> np.ndarray:
    """(rows, bytes of a row); the minimum is the mean of numbers, so that weights are centred."""
    found = numbers.integers(0, 256, (rows * depth // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    found[:, :4] = np.array([SCALE, 7.5 * SCALE], dtype=np.float16).view(np.uint8)
    return found.reshape(rows, -1)


def write(path: Path) -> None:
    metadata: dict[str, Any] = dict(GGUFHeader.open(embedded.fetch()).metadata)
    tokens = list(metadata[f"{TOKENIZER}tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(metadata[f"{TOKENIZER}model"])
    writer.add_tokenizer_pre(metadata[f"{TOKENIZER}pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([int(each) for each in metadata[f"{TOKENIZER}token_type"]])
    writer.add_token_merges(list(metadata[f"{TOKENIZER}merges"]))
    writer.add_bos_token_id(int(metadata[f"{TOKENIZER}bos_token_id"]))
    writer.add_eos_token_id(int(metadata[f"{TOKENIZER}eos_token_id"]))
    numbers, key_rows = np.random.default_rng(0), HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN)}
    for layer in range(LAYERS):
        parts = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (key_rows, HIDDEN),
            "attn_v": (key_rows, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", blocks(numbers, *shape), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
