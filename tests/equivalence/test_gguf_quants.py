"""Every GGUF number format against the reference implementation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ramify.models import gguf_quants
from ramify.models.gguf_quants import FORMATS_BY_NAME, QuantFormat, dequantize
from ramify.models.number_formats import type_name
from tests.quantised import HALVES

Bytes = npt.NDArray[np.uint8]
NUM_BLOCKS = 5
EVERY_FORMAT = pytest.mark.parametrize("quant_format", FORMATS_BY_NAME.values(), ids=lambda each: each.name)


def random_blocks(quant_format: QuantFormat, num_blocks: int, seed: int = 0) -> Bytes:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_blocks, quant_format.block_bytes), dtype=np.uint8)


def finite_blocks(quant_format: QuantFormat, num_blocks: int, seed: int = 0) -> Bytes:
    """Random blocks whose float16 scales have a clear bit in the exponent, hence no infinity and no NaN."""
    blocks = random_blocks(quant_format, num_blocks, seed)
    for offset in HALVES.get(quant_format.name, ()):
        blocks[:, offset + 1] &= 0b1011_1111
    return blocks


def reference(blocks: Bytes, quant_format: QuantFormat) -> npt.NDArray[np.float32]:
    quant_type = gguf.GGMLQuantizationType[quant_format.name]
    with np.errstate(all="ignore"):
        weights: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks, quant_type)
    return weights.reshape(-1)


def ours(blocks: Bytes, quant_format: QuantFormat) -> npt.NDArray[np.float32]:
    weights: npt.NDArray[np.float32] = dequantize(torch.from_numpy(blocks).view(-1), quant_format).numpy()
    return weights


def assert_same_bits(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Equal bits, signed zeros included; only the payload of a NaN is free, as processors differ there."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan)
    np.testing.assert_array_equal(actual[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))


@EVERY_FORMAT
def test_facts_of_the_format(quant_format: QuantFormat) -> None:
    quant_type = gguf.GGMLQuantizationType[quant_format.name]
    assert quant_type.value == quant_format.type_id
    sizes = gguf.GGML_QUANT_SIZES[quant_type]
    assert sizes == (quant_format.block_size, quant_format.block_bytes)


def test_every_type_has_the_name_ggml_gives_it() -> None:
    for quant_type in gguf.GGMLQuantizationType:
        assert type_name(quant_type.value) == quant_type.name


@EVERY_FORMAT
@pytest.mark.parametrize("num_blocks", [1, 2, 33, 1000])
def test_any_bytes(quant_format: QuantFormat, num_blocks: int) -> None:
    blocks = random_blocks(quant_format, num_blocks, seed=num_blocks)
    assert_same_bits(ours(blocks, quant_format), reference(blocks, quant_format))


@EVERY_FORMAT
def test_finite_scales(quant_format: QuantFormat) -> None:
    blocks = finite_blocks(quant_format, 2000)
    expected = reference(blocks, quant_format)
    if quant_format.block_size > 1:
        assert np.isfinite(expected).all()
    assert_same_bits(ours(blocks, quant_format), expected)


@EVERY_FORMAT
def test_every_byte_in_every_place(quant_format: QuantFormat) -> None:
    """Each of the 256 bytes at each place of a block, the rest of it unchanged."""
    base = finite_blocks(quant_format, 1, seed=7)
    blocks = np.repeat(base, 256 * quant_format.block_bytes, axis=0)
    places = np.repeat(np.arange(quant_format.block_bytes), 256)
    blocks[np.arange(len(blocks)), places] = np.tile(np.arange(256, dtype=np.uint8), quant_format.block_bytes)
    assert_same_bits(ours(blocks, quant_format), reference(blocks, quant_format))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights(name: str) -> None:
    """What a converter writes, not only what could be written (the reference cannot quantise K formats)."""
    weights = np.random.default_rng(1).normal(0, 0.05, (37, 256)).astype(np.float32)
    weights[3] = 0
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    blocks = np.ascontiguousarray(packed).view(np.uint8).reshape(-1, FORMATS_BY_NAME[name].block_bytes)
    actual = ours(blocks, FORMATS_BY_NAME[name])
    assert_same_bits(actual, reference(blocks, FORMATS_BY_NAME[name]))
    assert np.abs(actual - weights.reshape(-1)).max() < 0.03


@EVERY_FORMAT
def test_chunk_borders(quant_format: QuantFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(finite_blocks(quant_format, 40), quant_format)
    for num_chunk_blocks in (1, 3, 39, 40, 41):
        monkeypatch.setattr(gguf_quants, "CPU_CHUNK_WEIGHTS", num_chunk_blocks * quant_format.block_size)
        assert_same_bits(ours(finite_blocks(quant_format, 40), quant_format), expected)


@EVERY_FORMAT
def test_one_more_than_a_real_chunk(quant_format: QuantFormat) -> None:
    num_blocks = gguf_quants.CPU_CHUNK_WEIGHTS // quant_format.block_size + 1
    blocks = finite_blocks(quant_format, num_blocks)
    assert_same_bits(ours(blocks, quant_format), reference(blocks, quant_format))
