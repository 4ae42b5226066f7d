"""Weights that stay in the format of their checkpoint: the same numbers as dequantised ones, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from ramify import LLM, InvalidInputError, ModelError, SamplingParams, WeightsError
from ramify.cpu.library import Library
from ramify.cpu.panels import PanelPacking, Panels
from ramify.models import memory
from ramify.models.decoder import linears
from ramify.models.gguf_checkpoint import GGUFCheckpoint
from ramify.models.gguf_quants import FORMATS_BY_NAME
from ramify.models.packed_quants import PACKED_FORMATS
from ramify.models.stored import StoredTensor
from ramify.models.weights import EMBEDDING
from tests.conftest import CheckpointMaker
from tests.drawn_products import DrawnProduct, drawn_products, product_of
from tests.equivalence.test_cpu_kernels import library  # noqa: F401 - a fixture
from tests.native import needs_compiler
from tests.quantised import EVERY_FORMAT, stored, write_model

pytestmark = needs_compiler
STEPS = {name: max(each.block_size, 1) for name, each in EVERY_FORMAT.items()}


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_rows_are_what_gguf_reads(library: Library, name: str) -> None:  # noqa: F811
    """Every bit, the sign of zeros too; rows in any order, again and again."""
    depth = 3 * STEPS[name] if STEPS[name] > 1 else 77
    weight = stored(name, 150, depth, seed=1)
    ids = torch.tensor([149, 0, 63, 64, 65, 3, 3, *range(130)])
    rows = Panels(library, weight).rows(ids)
    if name == "BF16":
        expected = weight.numbers().float().numpy()
    else:
        expected = gguf.quants.dequantize(weight.rows().numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(rows.numpy().view(np.int32), np.ascontiguousarray(expected[ids.numpy()]).view(np.int32))


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_rows_are_the_numbers_of_their_blocks(library: Library, name: str) -> None:  # noqa: F811
    weight = stored(name, 150, 3 * STEPS[name], seed=1)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ids = torch.tensor([149, 0, 63, 64, 65, 3, 3, *range(130)])
    for each in (weight, replace(weight, order=order)):
        assert torch.equal(Panels(library, each).rows(ids), each.numbers()[ids])
    assert torch.equal(replace(weight, order=order).numbers()[:, order], weight.numbers())


@given(product=drawn_products())
@settings(max_examples=40)
def test_products_are_as_near_to_the_truth_as_those_of_float32(library: Library, product: DrawnProduct) -> None:  # noqa: F811
    """Parts of several formats, any number of rows: what float32 panels give, which other tests hold to the truth."""
    parts, gated = product.parts, product.gated
    x = torch.randn(product.rows, product.depth, generator=torch.Generator().manual_seed(product.seed))
    found = [product.of(x, PanelPacking(library, dequantize=dequantize)) for dequantize in (False, True)]
    # All that a weight is made of, number * scale and minimum, with magnitudes that may nearly cancel each other.
    sizes = [_size(x, part) for part in parts]
    if gated:
        gate, up = (x.double() @ part.numbers().double().t() for part in parts)
        size = (sizes[0] * up.abs() + sizes[1] * gate.abs()) + gate.abs() * up.abs()
        exact = torch.nn.functional.silu(gate) * up
        assert ((found[0] - exact).abs() <= 4e-6 * size).all()
    else:
        size, exact = torch.cat(sizes, 1), x.double() @ torch.cat([part.numbers().double() for part in parts]).t()
        assert ((found[0] - exact).abs() <= 1e-6 * size).all()
    assert ((found[0] - found[1]).abs() <= 5e-6 * size).all()


def _size(x: torch.Tensor, part: StoredTensor) -> torch.Tensor:
    weights = part.numbers().double().abs()
    return x.double().abs().amax(1, keepdim=True) @ (weights.sum(1) + len(weights.T) * weights.amax(1)).unsqueeze(0)


@pytest.mark.parametrize("name", [name for name in EVERY_FORMAT if EVERY_FORMAT[name].block_size > 1])
def test_fixed_point_rows_round_less_than_float32_sums(library: Library, name: str) -> None:  # noqa: F811
    """Rows with outliers, as hidden states have them: beside float64, one row is off by less than sums of float32."""
    depth = 6 * max(STEPS[name], 256)
    weight = stored(name, 200, depth, seed=3)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, depth, generator=generator) * torch.exp(2 * torch.randn(1, depth, generator=generator))
    exact = x.double() @ weight.numbers().double().t()
    errors = []
    for dequantize in (False, True):
        out = torch.empty(1, 200)
        product_of(PanelPacking(library, dequantize=dequantize), [weight]).multiply(x, out)
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    assert errors[0] <= 1.01 * errors[1] + 1e-9, errors


def test_a_row_has_the_same_bits_among_others_where_that_is_asked_for(library: Library) -> None:  # noqa: F811
    names = ["Q4_K", "Q6_K", "Q8_0"]
    packed = product_of(PanelPacking(library), [stored(name, 70, 768, seed=1) for name in names], batch_invariant=True)
    x = torch.randn(40, 768, generator=torch.Generator().manual_seed(3))
    together = torch.empty(40, 210)
    packed.multiply(x, together)
    for count in (1, 2, 3, 9):
        some = torch.empty(count, 210)
        packed.multiply(x[:count].contiguous(), some)
        assert torch.equal(some, together[:count])


def test_rows_at_the_ends_of_the_numbers(library: Library) -> None:  # noqa: F811
    """Zeros and the smallest numbers give nearly nothing; where an input is no number, no output of its row is one."""
    packed = product_of(PanelPacking(library), [stored("Q4_0", 70, 64, seed=1)])
    weights = stored("Q4_0", 70, 64, seed=1).numbers()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    x[0], x[1] = 0.0, 1e-44
    x[2, 40], x[3, 0], x[4, 63] = torch.nan, torch.inf, -torch.inf
    x[5] = 1e33
    x[6, 3] = 1e20  # in a block with smaller ones
    for row in range(8):
        out = torch.empty(1, 70)
        packed.multiply(x[row : row + 1].contiguous(), out)
        if row in (2, 3, 4):
            assert not out.isfinite().any()
        else:
            exact = x[row].double() @ weights.double().t()
            near = (out[0].double() - exact).abs() <= 1e-6 * x[row].abs().max() * weights.double().abs().sum(1) + 1e-30
            assert near.all()


# -- whole models --------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3], list(range(40)), [5, 3] * 90]
PARAMS = SamplingParams(n=3, seed=4, max_tokens=12, logprobs=1)


def _formats(llm: LLM) -> set[str]:
    decoder = llm.core.device.lanes[0].layers.decoder  # type: ignore[attr-defined]
    return {part.stored_in.name for linear in linears(decoder) for part in linear.parts.values()}


def _told(llm: LLM) -> list[tuple[tuple[int, ...], float | None]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(each.token_ids, each.cumulative_logprob) for output in outputs for each in output.outputs]


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_a_16_bit_checkpoint_keeps_its_bits(
    dtype: torch.dtype, name: str, make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen2", tie_word_embeddings=True)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept, dequantized = LLM(str(tmp_path), device="cpu"), LLM(str(tmp_path), device="cpu", dequantize=True)
    assert (_formats(kept), _formats(dequantized)) == ({name}, {"F32"})
    before = _told(kept)
    assert before == _told(dequantized)
    kept.load_weights(load_file(folder / "model.safetensors").items())  # in float32: they keep their bits too
    assert _formats(kept) == {"F32"}
    assert _told(kept) == _told(LLM(str(folder), device="cpu"))
    kept.load_weights(tensors.items())
    assert _told(kept) == before


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_all_formats_draws_what_it_draws_dequantised(tied: bool, tmp_path: Path) -> None:
    """Queries, keys and values of one layer are of three formats, gate and up of two."""
    path = tmp_path / "mixed.gguf"
    write_model(path, list(FORMATS_BY_NAME), tied=tied)
    options: dict[str, Any] = {"device": "cpu", "generation_config": "none"}
    packed, dequantized = LLM(str(path), **options), LLM(str(path), **options, dequantize=True)
    assert _formats(packed) == set(FORMATS_BY_NAME)
    told = _told(packed)
    for other in (dequantized, LLM(str(path), **options, enforce_eager=True)):
        for (tokens, logprob), (expected, its_logprob) in zip(told, _told(other), strict=True):
            assert tokens == expected
            assert logprob == pytest.approx(its_logprob, abs=5e-3)


def test_weights_held_quantised_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_model(path, ["Q4_K", "Q6_K"])
    llm = LLM(str(path), device="cpu")
    before = _told(llm)
    with pytest.raises(InvalidInputError, match=r"held quantised \(Q4_K, Q6_K\).*dequantize=True"):
        llm.load_weights([])
    assert _told(llm) == before  # nothing is lost
    checkpoint = GGUFCheckpoint.open(path)
    LLM(str(path), device="cpu", dequantize=True).load_weights(
        (name, tensor.numbers()) for name, tensor in checkpoint.stored()
    )


def test_a_head_stored_again_is_compared_with_the_packed_embedding(
    make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for head, is_right in ((tensors[EMBEDDING].clone(), True), (tensors[EMBEDDING] + 1, False)):
        save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if is_right:
            LLM(str(tmp_path), device="cpu")
        else:
            with pytest.raises(WeightsError, match="differs from"):
                LLM(str(tmp_path), device="cpu")


def test_a_model_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.gguf"
    write_model(path, ["Q8_0"])
    monkeypatch.setattr(memory, "total_memory", lambda: 100_000)
    with pytest.raises(ModelError, match="does not fit in memory"):
        LLM(str(path), device="cpu", num_kv_blocks=4)
