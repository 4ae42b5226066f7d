"""Damaged model files, loaded as a user would: weights, tokenizer and all. Refused or loaded, never worse."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ramify.config import ModelConfig
from ramify.cpu import library
from ramify.cpu.compiler import NoCompilerError
from ramify.cpu.panels import PanelPacking
from ramify.models.loader import ModelLoader
from tests.conftest import CheckpointMaker
from tests.corruption import (
    MEMORY_BOUND,
    Field,
    Survival,
    corruptions,
    gguf_fields,
    survive,
    survive_in_process,
)

NUM_VARIANTS = 220


def write_model(path: Path) -> None:
    """A Llama that runs, with a byte-level tokenizer, in a file of some 100 KB."""
    hidden, inner, layers, heads, kv_heads = 64, 96, 2, 4, 2
    byte_tokens = [chr(index) for index in range(33, 127)] + [chr(index) for index in range(161, 173)]
    byte_tokens += [chr(index) for index in range(174, 256)] + [chr(256 + index) for index in range(68)]
    tokens = [*byte_tokens, "he", "ll", "<|end|>"]
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0].content }}")

    def add(name: str, *shape: int) -> None:
        weights = generator.normal(0, 0.1, size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weights)
            return
        kind = gguf.GGMLQuantizationType.Q4_1 if "ffn" in name else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), hidden)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", hidden)
        add(f"blk.{layer}.attn_q.weight", hidden, hidden)
        add(f"blk.{layer}.attn_k.weight", hidden // 2, hidden)
        add(f"blk.{layer}.attn_v.weight", hidden // 2, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    add("output_norm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path, packing: PanelPacking | None = None) -> None:
    loader = ModelLoader(ModelConfig(model=str(path)))
    tokenizer = loader.load_tokenizer()
    decoder = loader.load_model("cpu", packing)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("hello 12 wörld"))
    if packing is None:
        decoder.embedding.sum()
    else:
        decoder.table.parts[0].rows(torch.arange(len(decoder.embedding))).sum()


def packing_here() -> PanelPacking | None:
    """The CPU's kernels where they can be had: then weights stay quantised, as in an engine."""
    try:
        return PanelPacking(library.load(lambda _: None))
    except NoCompilerError:
        return None


def try_gguf(sound_path: Path) -> Survival:
    packing = packing_here()
    load(sound_path, packing)
    sound = sound_path.read_bytes()
    header_bytes, fields = gguf_fields(sound)
    variants = corruptions(sound, header_bytes=header_bytes, fields=fields, count=NUM_VARIANTS, seed=1)
    return survive(variants, sound_path.with_name("damaged.gguf"), partial(load, packing=packing))


def try_safetensors(sound_folder: Path) -> Survival:
    load(sound_folder)
    weights = sound_folder / "model.safetensors"
    sound = weights.read_bytes()
    header_bytes = 8 + int.from_bytes(sound[:8], "little")
    fields = [Field("header length", 0, 8)]
    variants = corruptions(sound, header_bytes=header_bytes, fields=fields, count=NUM_VARIANTS, seed=2)
    return survive(variants, weights, lambda path: load(path.parent))


def check(report: Survival, size: int) -> None:
    assert report.failures == []
    assert report.refused + report.readable == NUM_VARIANTS
    assert report.refused > NUM_VARIANTS // 2
    assert report.growth < size + MEMORY_BOUND


def test_damaged_gguf_models_are_refused_or_loaded(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    write_model(path)
    check(survive_in_process("tests.unit.test_models_corrupted", "gguf", path), path.stat().st_size)


def test_damaged_safetensors_models_are_refused_or_loaded(make_checkpoint: CheckpointMaker) -> None:
    folder = make_checkpoint("llama")
    size = (folder / "model.safetensors").stat().st_size
    check(survive_in_process("tests.unit.test_models_corrupted", "safetensors", folder), size)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json_beside_the_weights(make_checkpoint: CheckpointMaker, name: str) -> None:
    folder = make_checkpoint("qwen3")
    sound = (folder / name).read_bytes()
    variants = corruptions(sound, header_bytes=len(sound), count=100, seed=3)
    report = survive(variants, folder / name, lambda path: load(path.parent))
    assert report.failures == []


if __name__ == "__main__":
    kind, where = sys.argv[1:]
    print((try_gguf if kind == "gguf" else try_safetensors)(Path(where)).as_json())
