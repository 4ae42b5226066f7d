"""Damaged GGUF files are refused or read, without a crash, a hang or a lot of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

from ramify.models.gguf_file import GGUFFile
from tests.corruption import MEMORY_BOUND, Survival, corruptions, gguf_fields, survive, survive_in_process

NUM_VARIANTS = 660  # sixty of each kind of damage


def write_small_model(path: Path) -> None:
    """The shape of a real file in little: a vocabulary, merges, and tensors of several formats."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_context_length(2048)
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_add_bos_token(False)
    writer.add_token_list([f"token{index}é" for index in range(64)])
    writer.add_token_types([1] * 64)
    writer.add_token_scores([-float(index) for index in range(64)])
    writer.add_token_merges([f"a{index} b{index}" for index in range(48)])
    writer.add_array("test.layers", [1, 2, 300])
    writer.add_chat_template("{{ messages }}")
    for index, name in enumerate(["Q4_1", "Q8_0", "Q5_0", "F16", "BF16", "F32"]):
        quant_type = gguf.GGMLQuantizationType[name]
        weights = generator.normal(size=(8, 64)).astype(np.float32)
        packed = gguf.quants.quantize(weights, quant_type)
        writer.add_tensor(f"blk.{index}.weight", packed, raw_dtype=quant_type)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_everything(path: Path) -> None:
    file = GGUFFile.open(path)
    for name, info in file.tensors.items():
        weights = file.tensor(name)
        assert tuple(weights.shape) == info.shape
        weights.double().sum()  # touches every page


def try_all_variants(sound_path: Path) -> Survival:
    sound = sound_path.read_bytes()
    header_bytes, fields = gguf_fields(sound)
    read_everything(sound_path)
    variants = corruptions(sound, header_bytes=header_bytes, fields=fields, count=NUM_VARIANTS)
    return survive(variants, sound_path.with_name("damaged.gguf"), read_everything)


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    write_small_model(path)
    report = survive_in_process("tests.unit.test_gguf_corrupted", path)
    assert report.failures == []
    assert report.refused + report.readable == NUM_VARIANTS
    # Damage that is never noticed, or always at the door, would test nothing.
    assert report.refused > NUM_VARIANTS // 2
    assert report.readable > NUM_VARIANTS // 20
    assert report.growth < path.stat().st_size + MEMORY_BOUND


if __name__ == "__main__":
    print(try_all_variants(Path(sys.argv[1])).as_json())
