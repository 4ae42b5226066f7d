"""Quantised folders on the GPU's layers, weights packed: layers and whole steps against the dequantised model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify import LLM, WeightsError
from ramify.config import EngineConfig, ModelConfig
from ramify.device.layers import Batch, TorchLayers
from ramify.device.pool import KVPool
from ramify.device.step import DeviceStep
from ramify.drive.placing import Wanted
from ramify.drive.placing import load as load_placed
from ramify.gpu.gpu_layers import GpuLayers
from ramify.gpu.gpu_step import gpu_step
from ramify.gpu.packed_parts import DevicePacking
from ramify.gpu.packed_weight import PackedWeight
from ramify.models.decoder import Decoder, linears
from ramify.models.linear import Linear
from ramify.models.loader import ModelLoader
from ramify.models.weights import EMBEDDING, TIED_HEAD
from tests.conftest import CheckpointMaker
from tests.kernels.test_gpu_step import OPTIONS, generate
from tests.quantised import stored
from tests.quantised_folder import Scheme, write_quantised

SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 64}
SCHEMES = {
    "gptq": Scheme("gptq"),  # awq is the same by now
    "gptq-act": Scheme("gptq", bits=8, desc_act=True),
    "fp8": Scheme("fp8"),
}


def load(folder: Path, device: torch.device, *, packed: bool) -> Decoder:
    loader = ModelLoader(ModelConfig(model=str(folder), device=device.type, dtype="float32"))
    return loader.load_model(packing=DevicePacking(device, torch.float32) if packed else None)


@pytest.mark.parametrize("name", SCHEMES)
def test_layers(name: str, device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """One row, few and many, with biases and without; attention is left out."""
    family = "qwen2" if name == "gptq-act" else "llama"
    folders = write_quantised(make_checkpoint(family, **SHAPES), tmp_path, SCHEMES[name])
    packed, dense = load(folders[0], device, packed=True), load(folders[1], device, packed=False)
    pool = KVPool(packed.arch, 6, 16, torch.float32, device)
    layers = GpuLayers(packed, pool, max_rows=96, max_model_len=96)
    layers._attend = lambda index, queries, pace: queries.flatten(1)  # type: ignore[method-assign]  # noqa: ARG005

    def skip(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001
        return queries.flatten(1)

    for rows in (1, 5, 70) if name == "gptq" else (1, 5):
        token_ids, positions = torch.arange(rows, device=device) % 64, torch.arange(rows, device=device) * 2
        expected = dense.forward(token_ids, positions, skip)
        with torch.inference_mode():
            hidden = layers.forward(Batch(token_ids, positions, torch.arange(rows, device=device)))
            logits = layers.logits(hidden)
        torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(logits, dense.logits(expected), atol=2e-3, rtol=1e-3)


def test_some_matrices_are_not_quantised(
    device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Of FP8 rows that are no whole blocks become numbers: then plain and packed weights follow each other."""
    folder = make_checkpoint("llama", **{**SHAPES, "intermediate_size": 200})
    folders = write_quantised(folder, tmp_path, SCHEMES["fp8"])
    packed, dense = load(folders[0], device, packed=True), load(folders[1], device, packed=False)
    layers = GpuLayers(packed, KVPool(packed.arch, 6, 16, torch.float32, device), max_rows=8, max_model_len=96)
    assert {bool(linear.parts) for linear in linears(packed)} == {False, True}
    layers._attend = lambda index, queries, pace: queries.flatten(1)  # type: ignore[method-assign]  # noqa: ARG005
    for rows in (1, 3):
        ids = torch.arange(rows, device=device)
        with torch.inference_mode():
            hidden = layers.forward(Batch(ids, ids, ids))
        expected = dense.forward(ids, ids, lambda _, queries, *__: queries.flatten(1))
        torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)


def test_whole_steps(device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Prompts, decodes and draws: the tokens of the dequantised model, with fewer bytes of weights."""
    folders = write_quantised(make_checkpoint("qwen3", **SHAPES), tmp_path, SCHEMES["gptq-act"])
    if device.type == "cuda":
        packed = LLM(str(folders[0]), **OPTIONS)
    else:
        packed = LLM(str(folders[1]), device="cpu", enforce_eager=True, **OPTIONS)
        step = packed.core.device
        assert isinstance(step, DeviceStep)
        assert isinstance(step.lanes[0].layers, TorchLayers)
        decoder = load(folders[0], device, packed=True)
        assert decoder.quantised_formats == ["INT8x128"]
        models = [(decoder, step.lanes[0].layers.pool)]
        packed.core.device = gpu_step(models, max_num_seqs=12, max_model_len=128)
    dense = LLM(str(folders[1]), device="cpu", enforce_eager=True, **OPTIONS)
    options = {"temperature": 0.0, "max_tokens": 3}
    assert generate(packed, **options) == generate(dense, **options)


@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_random_weights_have_the_bits_of_the_configuration(
    name: str, device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folders = write_quantised(make_checkpoint("llama", **SHAPES), tmp_path, SCHEMES[name])
    config = ModelConfig(model=str(folders[0]), device=device.type, dtype="float32", load_format="dummy", seed=3)
    decoders = [ModelLoader(config).load_model(packing=DevicePacking(device, torch.float32)) for _ in range(2)]
    assert decoders[0].quantised_formats == [{"gptq": "INT4x128", "fp8": "FP8"}[name]]
    for one, other in zip(*map(linears, decoders), strict=True):
        for first, part in one.parts.items():
            ids = torch.arange(8, device=device)
            rows = part.rows(ids)
            assert torch.equal(rows, other.parts[first].rows(ids))
            assert 0.01 < float(rows.std()) < 0.04
            assert bool(rows.isfinite().all())


def test_parts_tell_all_that_they_hold(device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folders = write_quantised(
        make_checkpoint("llama", **SHAPES), tmp_path, Scheme("gptq", group_size=32, desc_act=True)
    )
    decoder = load(folders[0], device, packed=True)
    part = decoder.layers[0].qkv.parts[0]
    assert len(part.tensors) == 3
    assert part.num_bytes == sum(tensor.nbytes for tensor in part.tensors)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_tied_head_that_is_stored_again(
    is_right: bool, device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """It is the embedding as the model holds it, on its device and in its precision. Many AWQ folders have one."""
    folder = make_checkpoint("llama", **SHAPES, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors[EMBEDDING] + (0.0 if is_right else 1.0)
    save_file({**tensors, TIED_HEAD: head}, path, metadata={"format": "pt"})
    folders = write_quantised(folder, tmp_path, SCHEMES["gptq"])
    loader = ModelLoader(ModelConfig(model=str(folders[0]), device=device.type, dtype="float16"))
    packing = DevicePacking(device, torch.float16)
    if is_right:
        assert loader.load_model(packing=packing).quantised_formats == ["INT4x128"]
    else:
        with pytest.raises(WeightsError, match="differs from"):
            loader.load_model(packing=packing)


@pytest.mark.parametrize("rows", [1, 40])
def test_logits_of_a_quantised_head_are_not_rounded(rows: int, device: torch.device) -> None:
    """Whatever form multiplies: with scales of 1 every weight is a number of 16 bits."""
    weight = stored("FP8", 48, 256, seed=1)
    weight.data.view(-1, weight.quant_format.block_bytes)[:, :4] = torch.ones(1).view(torch.uint8)
    linear = Linear(torch.empty(48, 256, device="meta"))
    linear.put(0, weight, DevicePacking(device, torch.float16))
    x = torch.randn(rows, 256, device=device).half()
    logits = torch.empty(rows, 48, device=device)
    PackedWeight(linear).logits(x, logits)
    expected = x.double() @ weight.numbers().to(device).double().t()
    assert float((logits - expected).norm() / expected.norm()) < 1e-6


def test_parts_are_joined_when_a_model_is_loaded(
    device: torch.device, make_checkpoint: CheckpointMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What joining frees would otherwise count among the memory that steps take, and the cache would be smaller."""
    folders = write_quantised(make_checkpoint("qwen2", **SHAPES), tmp_path, SCHEMES["gptq"])
    config = EngineConfig.from_options(model=str(folders[0]), device=device.type, dtype="float32")
    packing = DevicePacking(device, torch.float32)
    monkeypatch.setattr("ramify.drive.placing.gpu_packing", lambda *_: packing)
    decoder = load_placed(Wanted(config, ModelLoader(config)), None)
    assert [list(linear.parts) for linear in decoder.layers[0].linears] == [[0]] * 4
    assert not decoder.table.parts
    assert not decoder.embedding.is_meta
