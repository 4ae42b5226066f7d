"""Products of integers: the sums of a slow reference that does the same arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from ramify import LLM, InvalidInputError, SamplingParams, UnsupportedError
from ramify.cpu.library import Library
from ramify.cpu.panels import PanelPacking
from ramify.models.gguf_quants import FORMATS_BY_NAME
from ramify.models.stored import StoredTensor
from tests.conftest import CheckpointMaker
from tests.drawn_products import DrawnProduct, drawn_products, product_of
from tests.equivalence.test_cpu_kernels import library  # noqa: F401 - a fixture
from tests.native import needs_compiler
from tests.quantised import stored, write_model

pytestmark = needs_compiler


def _as_integers(x: Tensor) -> Tensor:
    """x (rows, depth) -> what the integers of its blocks stand for, float64."""
    blocks = x.view(len(x), -1, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    scales = torch.where(scales < 2.0**-126, 0.0, scales)
    numbers = torch.round(blocks * torch.where(scales > 0, 1 / scales, 0.0))
    assert float(numbers.abs().max()) <= 127
    return (numbers.double() * scales.double()).view(x.shape)


def _size(x: Tensor, part: StoredTensor) -> Tensor:
    """How large the terms of a product are: number * scale and minimum, which may nearly cancel, count apart."""
    weights = part.numbers().double().abs()
    return x.double().abs() @ (weights + weights.view(len(weights), -1, 32).amax(-1).repeat_interleave(32, 1)).t()


def _multiplied(x: Tensor, part: StoredTensor) -> Tensor:
    seen = _as_integers(x) if part.quant_format.holds_integers else x.double()
    return seen @ part.numbers().double().t()


@given(product=drawn_products(step=32))
@settings(max_examples=30)
def test_products_of_integers(library: Library, product: DrawnProduct) -> None:  # noqa: F811
    """Parts of several formats, any number of rows. Integers are exact, so only the last bits of sums may differ."""
    product = product._replace(alike=True)  # integers for few rows too
    parts = product.parts
    generator = torch.Generator().manual_seed(product.seed)
    x, spread = torch.randn(2, product.rows, product.depth, generator=generator)
    x = x * torch.exp(3 * spread)
    exact = torch.cat([_multiplied(x, part) for part in parts], dim=1)
    bound = torch.cat([_size(x, part) for part in parts], dim=1)
    out = product.of(x, PanelPacking(library, int8_activations=True))
    if product.gated:
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        tolerance = 1e-5 * (exact.abs() + bound.chunk(2, dim=1)[0] * up.abs() + bound.chunk(2, dim=1)[1] * gate.abs())
    else:
        tolerance = 2e-6 * bound
    wrong = (out - exact).abs() > tolerance
    assert not wrong.any(), (
        [part.quant_format for part in parts],
        wrong.nonzero()[:4].tolist(),
        out[wrong][:4],
        exact[wrong][:4],
        tolerance[wrong][:4],
    )


def test_a_row_does_not_depend_on_the_rows_beside_it(library: Library) -> None:  # noqa: F811
    packing = PanelPacking(library, int8_activations=True)
    parts = [stored("Q4_K", 100, 768, seed=1), stored("Q6_K", 30, 768, seed=2)]
    packed = product_of(packing, parts, batch_invariant=True)
    x = torch.randn(300, 768, generator=torch.Generator().manual_seed(3))
    together = torch.empty(300, 130)
    packed.multiply(x, together)
    for count in (1, 4, 9, 192):
        some = torch.empty(count, 130)
        packed.multiply(x[:count].contiguous(), some)
        assert torch.equal(some, together[:count])


@pytest.mark.parametrize("name", [each.name for each in FORMATS_BY_NAME.values() if each.holds_integers])
def test_few_rows_are_multiplied_as_without_it_where_that_is_faster(library: Library, name: str) -> None:  # noqa: F811
    """As integers they would take longer: one sequence lost two fifths of its speed by the option."""
    parts = [stored(name, 100, 1024, seed=1)]
    exact, rough = PanelPacking(library), PanelPacking(library, int8_activations=True)
    least = library.least_int8_rows(FORMATS_BY_NAME[name].type_id, alike=False)
    assert least >= 1
    for rows in (1, least - 1, least, 64):
        if rows < 1:
            continue
        x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rows))
        found, expected = torch.empty(2, rows, 100)
        product_of(rough, parts).multiply(x, found)
        product_of(exact, parts).multiply(x, expected)
        assert torch.equal(found, expected) == (rows < least), rows


def test_blocks_at_the_ends_of_the_numbers(library: Library) -> None:  # noqa: F811
    """Zeros and the smallest numbers give zeros; where an input is no number, no output of its row is one."""
    packing = PanelPacking(library, int8_activations=True)
    packed = product_of(packing, [stored("Q8_0", 70, 64, seed=1)], batch_invariant=True)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    x[0] = 0.0
    x[1] = 1e-44
    x[2, 40] = torch.nan
    x[3, 0], x[4, 63] = torch.inf, -torch.inf
    x[5] = 1e37
    out = torch.empty(7, 70)
    packed.multiply(x, out)
    assert not out[:2].any()
    assert out[2:5].isnan().all()
    assert out[5:].isfinite().all()


# -- whole models --------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"device": "cpu", "generation_config": "none", "num_kv_blocks": 64}
PROMPTS = [list(range(40)), [5, 3] * 40]


def _logprobs(llm: LLM, prompts: list[list[int]]) -> list[dict[int, float]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, logprobs=20), use_tqdm=False)
    return [{token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs]  # type: ignore[index]


def test_a_model_of_all_formats_is_close_to_itself(tmp_path: Path) -> None:
    """Other numbers than the exact model's, but near them; and the same for a prompt alone and among others."""
    path = tmp_path / "mixed.gguf"
    write_model(path, list(FORMATS_BY_NAME))
    exact, rough = LLM(str(path), **OPTIONS), LLM(str(path), **OPTIONS, int8_activations=True, batch_invariant=True)
    found, expected = _logprobs(rough, PROMPTS), _logprobs(exact, PROMPTS)
    assert found != expected
    for ours, theirs in zip(found, expected, strict=True):
        common = ours.keys() & theirs.keys()
        assert len(common) >= 10
        assert max(abs(ours[token] - theirs[token]) for token in common) < 0.5
    assert [_logprobs(rough, [prompt])[0] for prompt in PROMPTS] == found


def test_where_it_cannot_apply_it_is_refused(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder, path = str(make_checkpoint("llama")), tmp_path / "small.gguf"
    write_model(path, ["Q4_0"])
    with pytest.raises(UnsupportedError, match="this model has none"):
        LLM(folder, **OPTIONS, int8_activations=True)
    with pytest.raises(UnsupportedError, match=r"int8_activations needs .* kernels.*here enforce_eager"):
        LLM(str(path), **OPTIONS, int8_activations=True, enforce_eager=True)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size must be 1 with int8_activations, got 2"):
        LLM(str(path), **OPTIONS, int8_activations=True, tensor_parallel_size=2)
    with pytest.raises(InvalidInputError, match="ask for one of them"):
        LLM(str(path), **OPTIONS, int8_activations=True, dequantize=True)
    if not torch.cuda.is_available():
        return
    with pytest.raises(UnsupportedError, match="is for CPUs"):
        LLM(str(path), int8_activations=True, device="cuda")
