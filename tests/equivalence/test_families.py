"""Every family and every rope scaling against transformers: logits, and full greedy sequences."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ramify import LLM, SamplingParams
from ramify.device.layers import Batch, TorchLayers
from ramify.device.pool import KVPool
from ramify.engine.plan import Chunk
from ramify.models.loader import ModelLoader
from tests.attention_truth import reads_of
from tests.conftest import CheckpointMaker, rewrite_config
from tests.equal import check_greedy

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": YARN_MSCALE}),
    ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"rope_parameters": LLAMA3}),
    ("qwen3", {"attention_bias": True}),
]


def _names(variant: tuple[str, dict[str, Any]]) -> str:
    family, changes = variant
    facts = [
        f"{name}={value.get('rope_type') if isinstance(value, dict) else value}" for name, value in changes.items()
    ]
    return "-".join([family, *facts])


def _reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _prompts(seed: int, lengths: tuple[int, ...] = (1, 5, 17, 40, 150)) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS, ids=_names)
def test_logits_and_greedy_outputs_equal_transformers(
    variant: tuple[str, dict[str, Any]], make_checkpoint: CheckpointMaker
) -> None:
    family, changes = variant
    folder = make_checkpoint(family, **changes)
    reference = _reference(folder)
    prompts = _prompts(1)

    for prompt in prompts:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(_logits(folder, prompt), expected, atol=1e-4, rtol=0)

    llm = LLM(str(folder))
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    report = check_greedy(reference, prompts, [output.outputs[0].token_ids for output in outputs])
    assert report.near_ties <= 1
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)


def _logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    from ramify import ModelConfig

    decoder = ModelLoader(ModelConfig(model=str(folder))).load_model("cpu")
    pool = KVPool(decoder.arch, 16, 16, decoder.dtype, decoder.device)
    layers, positions = TorchLayers(decoder, pool), torch.arange(len(prompt))
    layers.prepare(reads_of([Chunk(prompt, 0, tuple(range(16)))], [], 16))
    hidden = layers.forward(Batch(torch.tensor(prompt), positions, slots=positions), positions[-1:])
    return layers.logits(hidden)[0]


def test_transformers_generate_itself_agrees(make_checkpoint: CheckpointMaker) -> None:
    """The teacher-forced check is an argument; here is its conclusion, seen once with the real thing."""
    folder = make_checkpoint("qwen2")
    reference = _reference(folder)
    prompt = _prompts(2, (23,))[0]
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :].tolist()
    output = LLM(str(folder)).generate([prompt], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert list(output[0].outputs[0].token_ids) == expected


def test_both_spellings_of_config_json_load_alike(make_checkpoint: CheckpointMaker) -> None:
    folder = make_checkpoint("llama", rope_parameters=LLAMA3)
    prompt = _prompts(3, (30,))[0]
    new_spelling = _logits(folder, prompt)
    old_scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    rewrite_config(
        folder, rope_parameters=None, rope_theta=10_000.0, rope_scaling=old_scaling, dtype=None, torch_dtype="bfloat16"
    )
    torch.testing.assert_close(_logits(folder, prompt), new_spelling, atol=0, rtol=0)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=lambda scaling: str(scaling["rope_type"]))
def test_the_length_before_stretching_may_stand_beside_the_scaling(
    make_checkpoint: CheckpointMaker, scaling: dict[str, Any]
) -> None:
    """There it outranks the one inside, or is the only one; it was not looked at once, and positions were wrong."""
    folder = make_checkpoint("llama", rope_parameters=scaling)
    prompt = _prompts(6, (60,))[0]
    for inside in ({}, {"original_max_position_embeddings": 256}):
        kept = {name: value for name, value in scaling.items() if name != "original_max_position_embeddings"}
        rewrite_config(folder, rope_parameters={**kept, **inside}, original_max_position_embeddings=100)
        with torch.no_grad():
            expected = _reference(folder)(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(_logits(folder, prompt), expected, atol=1e-4, rtol=0)


def test_a_single_file_outranks_an_index_beside_it(make_checkpoint: CheckpointMaker) -> None:
    """A folder that was sharded, then saved again in one piece: transformers reads the piece."""
    whole, folder = make_checkpoint("qwen3"), make_checkpoint("qwen3", max_shard_size="100KB", tie_word_embeddings=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(whole / name, folder)
    prompt = _prompts(7, (30,))[0]
    with torch.no_grad():
        expected = _reference(folder)(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(_logits(folder, prompt), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(_logits(folder, prompt), _logits(whole, prompt), atol=0, rtol=0)


def test_sharded_checkpoints_load_like_whole_ones(make_checkpoint: CheckpointMaker) -> None:
    whole, sharded = make_checkpoint("qwen3"), make_checkpoint("qwen3", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    prompt = _prompts(4, (30,))[0]
    torch.testing.assert_close(_logits(sharded, prompt), _logits(whole, prompt), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_run_in_float32_on_a_cpu(
    make_checkpoint: CheckpointMaker, dtype: torch.dtype
) -> None:
    folder = make_checkpoint("llama")
    _reference(folder).to(dtype).save_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = _prompts(5, (30,))[0]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(_logits(folder, prompt), expected, atol=1e-4, rtol=0)
