"""Quantised folders in bfloat16 on a GPU: layers and whole engines, weights packed, against the dequantised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import LLM, SamplingParams
from ramify.config import ModelConfig
from ramify.device.layers import Batch
from ramify.device.pool import KVPool
from ramify.gpu.gpu_layers import GpuLayers
from ramify.gpu.packed_parts import DevicePacking
from ramify.models.loader import ModelLoader
from tests.conftest import CheckpointMaker
from tests.quantised_folder import Scheme, write_quantised

SHAPES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "vocab_size": 320,
}
SCHEMES = {
    "gptq4": Scheme("gptq"),
    "gptq4-sym": Scheme("gptq", sym=True),
    "gptq8": Scheme("gptq", bits=8),
    "gptq8-act": Scheme("gptq", bits=8, desc_act=True),
    "gptq4-32": Scheme("gptq", group_size=32),
    "awq": Scheme("awq"),
    "fp8": Scheme("fp8"),
}
PROMPTS = [[5, 6, 7], list(range(10, 60)), list(range(10, 200)), *([token] for token in range(40, 300, 20))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SCHEMES)
def test_layers(name: str, dtype: str, device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Off from the float32 model by what rounding activations costs the same layers with the dequantised weights."""
    if dtype == "float16" and name not in ("gptq8", "fp8"):
        pytest.skip("one of each kind will do")
    folders = write_quantised(make_checkpoint("qwen2", **SHAPES), tmp_path, SCHEMES[name])

    def load(folder: Path, number: str, packing: DevicePacking | None):  # type: ignore[no-untyped-def]
        config = ModelConfig(model=str(folder), device="cuda", dtype=number)  # type: ignore[arg-type]
        return ModelLoader(config).load_model(packing=packing)

    number = getattr(torch, dtype)
    exact, decoders = load(folders[1], "float32", None), {
        "packed": load(folders[0], dtype, DevicePacking(device, number)),
        "rounded": load(folders[1], dtype, None),
    }  # fmt: skip
    for rows in (1, 7, 13, 40, 200):
        token_ids, positions = torch.arange(rows, device=device) % 320, torch.arange(rows, device=device) % 64
        expected = exact.logits(exact.forward(token_ids, positions, lambda _, queries, *__: queries.flatten(1)))
        errors = {}
        for kind, decoder in decoders.items():
            layers = GpuLayers(decoder, KVPool(decoder.arch, 30, 16, number, device), max_rows=256, max_model_len=96)
            layers._attend = lambda index, queries, pace: queries.flatten(1)  # type: ignore[method-assign]  # noqa: ARG005
            with torch.inference_mode():
                hidden = layers.forward(Batch(token_ids, positions, torch.arange(rows, device=device)))
                logits = layers.logits(hidden)
            errors[kind] = float((logits - expected).norm() / expected.norm())
        assert errors["packed"] <= max(1.5 * errors["rounded"], 2e-3), (rows, errors)


@pytest.mark.parametrize("name", ["gptq4", "gptq8", "gptq8-act", "fp8"])
def test_engines(name: str, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Greedy tokens where the float32 model is sure of them, and their logprobs: prompts and decodes in graphs."""
    folders = write_quantised(make_checkpoint("qwen3", **SHAPES), tmp_path, SCHEMES[name])
    options: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 12}
    packed = LLM(str(folders[0]), dtype="bfloat16", **options)
    exact = LLM(str(folders[1]), device="cpu", dtype="float32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    compared = 0
    for own, wanted in zip(
        packed.generate(PROMPTS, params, use_tqdm=False), exact.generate(PROMPTS, params, use_tqdm=False), strict=True
    ):
        completion, expected = own.outputs[0], wanted.outputs[0]
        assert completion.logprobs is not None
        assert expected.logprobs is not None
        rows = zip(completion.token_ids, expected.token_ids, completion.logprobs, expected.logprobs, strict=True)
        for token, expected_token, row, expected_row in rows:
            first, second = sorted((entry.logprob for entry in expected_row.values()), reverse=True)[:2]
            if first - second < 0.2:
                break  # either may come, and then the texts differ
            assert token == expected_token
            assert row[token].logprob == pytest.approx(first, abs=0.1)
            compared += 1
    assert compared > 4, "most tokens are not near a tie"
