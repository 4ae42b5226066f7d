"""GPTQ, AWQ and FP8 checkpoints: the numbers of the published formulas bit for bit, the tokens of the dequantised
model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from ramify import LLM, SamplingParams, WeightsError
from ramify.models.decoder import linears
from ramify.models.quantization_config import quantization_from_config
from ramify.models.st_file import SafetensorsCheckpoint
from ramify.models.stored import Part, StoredTensor
from ramify.models.survey import survey_model
from tests.conftest import CheckpointMaker
from tests.quantised_folder import Scheme, write_quantised
from tests.ranks import RankThread, rank_threads  # noqa: F401 - a fixture

SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
SCHEMES = {
    "gptq-4-128": Scheme("gptq"),
    "gptq-4-32-sym": Scheme("gptq", group_size=32, sym=True),
    "gptq-4-64-act": Scheme("gptq", group_size=64, desc_act=True),
    "gptq-4-row": Scheme("gptq", group_size=-1),
    "gptq-8-128-sym": Scheme("gptq", bits=8, sym=True),
    "gptq-8-32-act": Scheme("gptq", bits=8, group_size=32, desc_act=True),
    "gptq-v2": Scheme("gptq", is_v2=True),
    "gptq-v2-8-sym-act": Scheme("gptq", bits=8, is_v2=True, sym=True, desc_act=True),
    "gptq-v2-labelled-v1": Scheme("gptq", sym=True, is_v2=True, options={"checkpoint_format": "gptq"}),
    "gptq-bf16-scales": Scheme("gptq", scale_dtype=torch.bfloat16),
    "gptq-f32-scales": Scheme("gptq", scale_dtype=torch.float32),  # that no float16 holds
    "gptq-groups-of-16": Scheme("gptq", group_size=16, desc_act=True),
    "awq-128": Scheme("awq"),
    "awq-32": Scheme("awq", group_size=32),
    "fp8": Scheme("fp8", scale_dtype=torch.bfloat16),
    "fp8-f32-scales": Scheme("fp8", scale_dtype=torch.float32),
}
DENSE = ("gptq-f32-scales", "gptq-groups-of-16")  # what no block holds exactly
PARAMS = SamplingParams(n=2, seed=4, max_tokens=8, logprobs=1)


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_are_those_of_the_formulas(name: str, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Bit for bit; and any rows or columns of them are what ranks of a shared model get."""
    folders = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, SCHEMES[name])
    expected = load_file(folders[1] / "model.safetensors")
    checkpoint, is_packed = SafetensorsCheckpoint(folders[0]), set[bool]()
    assert dict(checkpoint.shapes) == {key: tuple(tensor.shape) for key, tensor in expected.items()}
    for key, tensor in checkpoint.stored():
        if isinstance(tensor, StoredTensor):
            is_packed.add(tensor.is_quantised)
            numbers = tensor.numbers()
            for part in (Part(0, 32, 64), Part(1, 64, 128), Part(1, 0, 96)):
                of = tensor.cut(part).numbers()
                assert torch.equal(of, expected[key].narrow(part.dimension, part.start, part.stop - part.start))
        else:
            numbers = tensor
        assert torch.equal(numbers, expected[key]), key
    assert is_packed == {name not in DENSE}


@pytest.mark.parametrize("name", ["gptq-4-32-sym", "gptq-8-32-act", "gptq-f32-scales", "awq-128", "fp8"])
def test_tokens_are_those_of_the_dequantised_model(name: str, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folders = write_quantised(make_checkpoint("qwen3", **SHAPES), tmp_path, SCHEMES[name])
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 128}
    packed = LLM(str(folders[0]), **options)
    told, expected = _told(packed), _told(LLM(str(folders[1]), **options))
    assert [tokens for tokens, _ in told] == [tokens for tokens, _ in expected]
    assert [logprob for _, logprob in told] == pytest.approx([logprob for _, logprob in expected], abs=1e-4)
    assert expected == _told(LLM(str(folders[0]), **options, dequantize=True))
    decoder = packed.core.device.lanes[0].layers.decoder  # type: ignore[attr-defined]
    if name not in DENSE and decoder.packing is not None:
        assert {"INT4x128", "INT4x32", "INT8x32", "FP8"} & set(decoder.quantised_formats)
        matrices = sum(linear.weight.numel() for linear in linears(decoder)[2:])
        bits = 8 * sum(part.num_bytes for linear in linears(decoder)[2:] for part in linear.parts.values()) / matrices
        assert bits < 1.3 * SCHEMES[name].bits if "fp8" not in name else bits < 8.5


def test_matrices_of_one_input_in_different_orders_are_dequantised(
    make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    scheme = Scheme("gptq", group_size=32, desc_act=True)
    folders = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, scheme)
    tensors = load_file(folders[0] / "model.safetensors")
    other = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[other] = tensors[other].flip(0)
    save_file(tensors, folders[0] / "model.safetensors")
    stored = dict(SafetensorsCheckpoint(folders[0]).stored())
    packed = {name for name, each in stored.items() if isinstance(each, StoredTensor) and each.is_quantised}
    assert not any("layers.0.self_attn.q_proj" in name or "layers.0.self_attn.k_proj" in name for name in packed)
    assert {"model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.k_proj.weight"} <= packed
    expected = load_file(folders[1] / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    numbers = stored["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(numbers, StoredTensor)
    assert torch.equal(numbers.numbers(), expected)


def test_matrices_of_one_input_are_held_alike(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Scales of one that float16 does not have: once the others were held in the order of their groups, and this one
    was not, which no product can multiply."""
    scheme = Scheme("gptq", group_size=32, desc_act=True, scale_dtype=torch.bfloat16)
    folders = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, scheme)
    tensors = load_file(folders[0] / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.scales"][0, 0] = 2.0**-30
    save_file(tensors, folders[0] / "model.safetensors")
    stored = dict(SafetensorsCheckpoint(folders[0]).stored())
    packed = {name for name, each in stored.items() if isinstance(each, StoredTensor) and each.is_quantised}
    assert not any(f"layers.0.self_attn.{name}_proj" in each for name in "qkv" for each in packed)
    assert {"model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.k_proj.weight"} <= packed
    told = [
        _told(LLM(str(folders[0]), device="cpu", max_model_len=128, dequantize=dequantize))
        for dequantize in (False, True)
    ]
    assert [tokens for tokens, _ in told[0]] == [tokens for tokens, _ in told[1]]


def test_biases_that_only_gptq_wrote(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Zeros for every matrix of a model that has biases for some: such checkpoints were refused for them once."""
    folders = write_quantised(make_checkpoint("qwen2", **SHAPES), tmp_path, SCHEMES["gptq-4-32-sym"])
    path = folders[0] / "model.safetensors"
    tensors = load_file(path)
    expected = SafetensorsCheckpoint(folders[0])
    for name in [each for each in tensors if each.endswith(".qweight")]:
        zeros = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
        tensors.setdefault(f"{name.removesuffix('.qweight')}.bias", zeros)
    save_file(tensors, path)
    checkpoint = SafetensorsCheckpoint(folders[0])
    assert dict(checkpoint.shapes) == dict(expected.shapes)
    assert {name for name, _ in checkpoint.stored()} == set(expected.shapes)
    assert "model.layers.0.self_attn.q_proj.bias" in checkpoint.shapes  # its own
    assert survey_model(folders[0]).num_parameters == sum(map(math.prod, expected.shapes.values()))
    llm = LLM(str(folders[0]), device="cpu", max_model_len=128)
    assert [tokens for tokens, _ in _told(llm)] == [
        tokens for tokens, _ in _told(LLM(str(folders[1]), device="cpu", max_model_len=128))
    ]
    tensors["model.layers.1.mlp.down_proj.bias"][3] = 0.5
    save_file(tensors, path)
    with pytest.raises(
        WeightsError, match=r"layers\.1\.mlp\.down_proj\.bias is not zero, and the model has no such bias"
    ):
        LLM(str(folders[0]), device="cpu")


def test_fp8_is_what_transformers_reads(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folders = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, SCHEMES["fp8"])
    tensors, count = load_file(folders[0] / "model.safetensors"), 0
    theirs = Fp8Dequantize(None)
    for name, tensor in SafetensorsCheckpoint(folders[0]).stored():
        if isinstance(tensor, StoredTensor) and min(tensor.shape) >= 128:
            expected = theirs._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.float32)
            assert torch.equal(tensor.numbers(), expected)
            count += 1
    assert count == 10


@pytest.mark.parametrize(
    ("theirs", "method"),
    [
        (transformers.FineGrainedFP8Config(), "fp8"),
        (transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]), "fp8"),
        (transformers.GPTQConfig(bits=4), "gptq"),
        (transformers.GPTQConfig(bits=8, sym=False, group_size=-1, format="gptq_v2"), "gptq"),
        (transformers.AwqConfig(bits=4), "awq"),
    ],
)
def test_what_transformers_writes_in_a_config_is_read(theirs: Any, method: str) -> None:
    """All its options, also those that say what is so anyway: of FP8, two of them were refused once."""
    config = json.loads(json.dumps(theirs.to_dict()))
    read = quantization_from_config({"quantization_config": config})
    assert read is not None
    assert (read.method, read.group_size) == (method, config.get("group_size", 128))


def test_fp8_blocks_at_the_edges(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Rows that end inside a block: 200 outputs stay packed, 200 columns become float32."""
    shapes = {**SHAPES, "intermediate_size": 200}
    folders = write_quantised(make_checkpoint("llama", **shapes), tmp_path, SCHEMES["fp8"])
    expected = load_file(folders[1] / "model.safetensors")
    for name, tensor in SafetensorsCheckpoint(folders[0]).stored():
        if isinstance(tensor, StoredTensor):
            assert tensor.is_quantised == ("down" not in name)
            assert torch.equal(tensor.numbers(), expected[name])


def test_two_ranks_read_their_parts(
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
    tmp_path: Path,
) -> None:
    folders = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, SCHEMES["gptq-4-64-act"])
    options: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 32}
    alone, shared = (
        LLM(str(folders[0]), tensor_parallel_size=size, **options).generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        for size in (1, 2)
    )
    assert [each.token_ids for each in shared[0].outputs] == [each.token_ids for each in alone[0].outputs]
    assert rank_threads


def _told(llm: LLM) -> list[tuple[tuple[int, ...], float | None]]:
    outputs = llm.generate([[1, 2, 3], [5, 3] * 20], PARAMS, use_tqdm=False)
    return [(each.token_ids, each.cumulative_logprob) for output in outputs for each in output.outputs]
