"""GGUF files as the reference writes them, and each way in which a file can be wrong."""

from __future__ import annotations

import gc
import struct
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ramify.errors import FileFormatError, ModelNotFoundError, UnsupportedModelError, WeightsError
from ramify.models.gguf_file import GGUFFile
from ramify.models.gguf_header import MEMORY_PER_HEADER_BYTE

NAME = "crafted.gguf"
U8, I8, U16, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 2, 4, 6, 7, 8, 9, 10
TYPE_F32, TYPE_Q4_1, TYPE_IQ2_XXS = 0, 3, 16
EVERY_SCALAR = {
    "uint8": 200,
    "int8": -100,
    "uint16": 60000,
    "int16": -30000,
    "uint32": 4_000_000_000,
    "int32": -2_000_000_000,
    "uint64": 2**64 - 1,
    "int64": -(2**63),
    "float32": 0.5,
    "float64": 0.1,
    "bool": True,
    "string": "naïve 東京",
}


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return u64(len(encoded)) + encoded


def entry(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + u32(value_type) + value


def array(element_type: int, count: int, elements: bytes) -> bytes:
    return u32(element_type) + u64(count) + elements


def tensor(name: str | bytes, dims: tuple[int, ...], type_id: int = TYPE_F32, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


def build(
    *parts: bytes,
    entries: int = 0,
    tensors: int = 0,
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """A file of the given parts; the counts are whatever the test says, right or wrong."""
    header = magic + u32(version) + u64(tensors) + u64(entries) + b"".join(parts)
    return header + b"\0" * (-len(header) % 32) + data if tensors else header


def open_bytes(tmp_path: Path, contents: bytes) -> GGUFFile:
    path = tmp_path / NAME
    path.write_bytes(contents)
    return GGUFFile.open(path)


def refusal(tmp_path: Path, contents: bytes, error: type[Exception] = FileFormatError) -> str:
    with pytest.raises(error) as caught:
        open_bytes(tmp_path, contents)
    message = str(caught.value)
    assert NAME in message
    assert str(tmp_path) not in message
    return message


def write_reference_file(path: Path, alignment: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """All kinds of metadata and several formats, written by the `gguf` package; returns the stored arrays."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for kind, value in EVERY_SCALAR.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["", "a", "Ġthe", "🌍", "x" * 300])
    writer.add_array("test.ints", [1, -2, 2**31 - 1])
    writer.add_array("test.floats", [0.5, -1.25])
    writer.add_array("test.bools", [True, False, True])
    stored = {}
    generator = np.random.default_rng(0)
    shapes = [("F32", (3,)), ("F16", (2, 5)), ("BF16", (3, 8)), ("Q4_1", (7, 64)), ("Q8_0", (2, 3, 32))]
    for quantization, shape in [*shapes, ("Q5_1", (1, 2, 3, 32))]:
        quant_type = gguf.GGMLQuantizationType[quantization]
        stored[quantization] = gguf.quants.quantize(generator.normal(size=shape).astype(np.float32), quant_type)
        writer.add_tensor(f"{quantization}.weight", stored[quantization], raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_agrees_with_the_reference_reader(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "reference.gguf"
    write_reference_file(path, alignment)
    reader = gguf.GGUFReader(path)
    file = GGUFFile.open(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        value = file.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert list(file.tensors) == [each.name for each in reader.tensors]
    for each in reader.tensors:
        info = file.tensors[each.name]
        assert info.shape == tuple(reversed(each.shape.tolist()))
        assert info.quantization == each.tensor_type.name
        assert (info.offset, info.num_bytes) == (each.data_offset, each.n_bytes)
        weights = file.tensor(each.name)
        assert tuple(weights.shape) == info.shape
        expected = gguf.quants.dequantize(each.data, each.tensor_type).reshape(info.shape)
        np.testing.assert_array_equal(weights.float().numpy(), expected)


def test_metadata_has_plain_types(tmp_path: Path) -> None:
    path = tmp_path / "reference.gguf"
    write_reference_file(path)
    file = GGUFFile.open(path)
    for kind, value in EVERY_SCALAR.items():
        read = file.metadata[f"test.{kind}"]
        assert read == value
        assert type(read) is type(value)
    assert file.metadata["test.strings"] == ["", "a", "Ġthe", "🌍", "x" * 300]
    for key, dtype in (("test.ints", np.int32), ("test.floats", np.float32), ("test.bools", np.bool_)):
        numbers = file.metadata[key]
        assert isinstance(numbers, np.ndarray)
        assert numbers.dtype == dtype
        assert not numbers.flags.writeable


def test_dtypes_are_kept_or_float32(tmp_path: Path) -> None:
    path = tmp_path / "reference.gguf"
    write_reference_file(path)
    file = GGUFFile.open(path)
    dtypes = {info.quantization: file.tensor(name).dtype for name, info in file.tensors.items()}
    assert dtypes.pop("F16") == torch.float16
    assert dtypes.pop("BF16") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}


def test_views_outlive_the_file_and_never_reach_it(tmp_path: Path) -> None:
    contents = build(tensor("x", (2,)), tensors=1, data=struct.pack("<2f", 1.5, 2.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about memory it may not write to
        weights = open_bytes(tmp_path, contents).tensor("x")
    gc.collect()
    assert weights.tolist() == [1.5, 2.5]
    weights.zero_()
    assert (tmp_path / NAME).read_bytes() == contents


def test_an_unknown_tensor_name(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, build(entries=0))
    with pytest.raises(WeightsError, match="has no tensor 'x'"):
        file.tensor("x")


def test_smallest_files(tmp_path: Path) -> None:
    for version in (2, 3):
        assert open_bytes(tmp_path, build(version=version)).tensors == {}
    file = open_bytes(tmp_path, build(entry("a", ARRAY, array(U8, 0, b"")), entries=1))
    assert isinstance(file.metadata["a"], np.ndarray)
    assert file.metadata["a"].tolist() == []


def test_tensors_may_stand_in_any_order_with_gaps(tmp_path: Path) -> None:
    data = struct.pack("<f", 1) + b"\0" * 92 + struct.pack("<f", 2)
    file = open_bytes(tmp_path, build(tensor("b", (1,), offset=96), tensor("a", (1,), offset=0), tensors=2, data=data))
    assert (file.tensor("a").item(), file.tensor("b").item()) == (1, 2)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="is not a file"):
            GGUFFile.open(path)


ONE_F32 = build(tensor("x", (8,)), tensors=1, data=bytes(32))

REFUSALS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "other magic": (build(magic=b"GGML"), "not a GGUF file"),
    "short magic": (b"GGU", "not a GGUF file"),
    "version 1": (build(version=1), "GGUF version 1; supported versions are 2 and 3"),
    "version 4": (build(version=4), "GGUF version 4;"),
    "version 0": (build(version=0), "GGUF version 0;"),
    "big-endian": (build(version=0x03000000), "version 3 in big-endian"),
    "no counts": (b"GGUF" + u32(3), "the number of tensors needs 8 bytes"),
    "too many tensors": (build(tensors=2**63), f"{2**63} tensors are claimed"),
    "too many entries": (build(entries=2**64 - 1), "metadata entries are claimed, but only 0 bytes"),
    "one entry too many": (build(entry("a", U64, u64(1)), entries=2), "2 metadata entries are claimed"),
    "entries cut off": (
        build(entry("a", U64, u64(1)), entry("b", U64, u64(1)), entries=3),
        "a metadata key is cut off",
    ),
    "long key": (build(u64(2**40), bytes(99), entries=1), f"claims {2**40} bytes"),
    "very long key": (build(entry("k" * 65536, U8, b"\0"), entries=1), "has 65536 bytes"),
    "empty key": (build(entry("", U8, b"\0"), bytes(9), entries=1), "has 0 bytes"),
    "key not UTF-8": (build(entry(b"\xff\xfe", U8, b"\0"), entries=1), "a metadata key at 32 is not UTF-8"),
    "value not UTF-8": (build(entry("a", STRING, string(b"\xc3(")), entries=1), "'a' at 45 is not UTF-8"),
    "surrogate": (build(entry("a", STRING, string(b"\xed\xa0\x80")), entries=1), "is not UTF-8"),
    "duplicate key": (
        build(entry("a", U8, b"\0"), entry("a", U8, b"\0"), entries=2),
        "the metadata key 'a' appears twice",
    ),
    "unknown value type": (build(entry("a", 13, u64(0)), entries=1), "'a' has the unknown value type 13"),
    "long string": (build(entry("a", STRING, u64(2**64 - 1)), entries=1), "'a' at 45 claims"),
    "value cut off": (build(entry("abc", U64, u64(0)[:4]), entries=1), "'abc' needs 8 bytes"),
    "boolean of two": (build(entry("a", BOOL, b"\2"), entries=1), "neither 0 nor 1"),
    "booleans of two": (build(entry("a", ARRAY, array(BOOL, 2, b"\0\2")), entries=1), "neither 0 nor 1"),
    "long array": (build(entry("a", ARRAY, array(U32, 2**62, b"")), entries=1), "numbers in 'a' are claimed"),
    "long string array": (
        build(entry("a", ARRAY, array(STRING, 3, string("x") * 2)), entries=1),
        "3 strings in 'a' are claimed",
    ),
    "string array cut off": (
        build(entry("a", ARRAY, array(STRING, 2, string("abcdefgh"))), entries=1),
        "'a' is cut off",
    ),
    "long boolean array": (build(entry("a", ARRAY, array(BOOL, 9, b"\0")), entries=1), "9 booleans in 'a'"),
    "unknown element type": (build(entry("a", ARRAY, array(99, 0, b"")), entries=1), "unknown value type 99"),
    "nested array": (
        build(entry("a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0"))), entries=1),
        "an array of arrays",
    ),
    "alignment zero": (
        build(entry("general.alignment", U32, u32(0)), entries=1),
        "general.alignment is 0, not a power of two from 8 to 65536",
    ),
    "alignment odd": (build(entry("general.alignment", U32, u32(48)), entries=1), "alignment is 48"),
    "alignment huge": (
        build(entry("general.alignment", U32, u32(1 << 17)), entries=1),
        "alignment is 131072",
    ),
    "alignment text": (
        build(entry("general.alignment", STRING, string("32")), entries=1),
        "alignment is '32'",
    ),
    "alignment array": (
        build(entry("general.alignment", ARRAY, array(U32, 1, u32(32))), entries=1),
        "alignment is array",
    ),
    "no dims": (build(tensor("x", ()), bytes(9), tensors=1, data=bytes(32)), "tensor 'x' has 0 dims"),
    "five dims": (build(tensor("x", (1, 1, 1, 1, 1)), tensors=1, data=bytes(32)), "tensor 'x' has 5 dims"),
    "a dim of zero": (build(tensor("x", (8, 0)), tensors=1), r"tensor 'x' of shape (0, 8) is empty"),
    "tensor not UTF-8": (build(tensor(b"\xff", (8,)), tensors=1, data=bytes(32)), "a tensor name at 32"),
    "tensor without name": (build(tensor("", (8,)), tensors=1, data=bytes(32)), "a tensor name at 24 has 0"),
    "duplicate tensor": (
        build(tensor("x", (8,)), tensor("x", (8,), offset=32), tensors=2, data=bytes(64)),
        "the tensor name 'x' appears twice",
    ),
    "part of a block": (
        build(tensor("x", (40, 2), TYPE_Q4_1), tensors=1, data=bytes(64)),
        "rows of 40 weights, not whole Q4_1 blocks of 32",
    ),
    "overflowing dims": (
        build(tensor("x", (2**62, 2**62, 2**62, 4)), tensors=1, data=bytes(32)),
        "but the file is cut off at",
    ),
    "dims that wrap to zero": (build(tensor("x", (2**32, 2**32)), tensors=1, data=bytes(32)), "cut off"),
    "odd offset": (
        build(tensor("x", (8,), offset=16), tensors=1, data=bytes(64)),
        "offset 16, not a multiple of 32",
    ),
    "offset past the end": (build(tensor("x", (8,), offset=2**63), tensors=1, data=bytes(32)), "cut off"),
    "offset that wraps": (build(tensor("x", (8,), offset=2**64 - 32), tensors=1, data=bytes(32)), "cut off"),
    "overlap": (
        build(tensor("x", (16,)), tensor("y", (8,), offset=32), tensors=2, data=bytes(64)),
        "tensors 'x' and 'y' overlap",
    ),
    "same place": (
        build(tensor("x", (8,)), tensor("y", (8,)), tensors=2, data=bytes(64)),
        "tensors 'x' and 'y' overlap",
    ),
    "data cut off": (ONE_F32[:-1], "tensor 'x' of shape (8,) ends at 96, but the file is cut off at 95"),
    "no data": (ONE_F32[:-32], "the file is cut off at 64"),
    "no padding": (ONE_F32[:57], "the file is cut off at 57"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused(tmp_path: Path, case: str) -> None:
    contents, expected = REFUSALS[case]
    assert expected in refusal(tmp_path, contents)


def test_the_file_the_refusals_vary_is_sound(tmp_path: Path) -> None:
    assert open_bytes(tmp_path, ONE_F32).tensor("x").tolist() == [0.0] * 8


def test_every_truncation_of_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.gguf"
    write_reference_file(path)
    contents = path.read_bytes()
    last_data_byte = max(info.offset + info.num_bytes for info in GGUFFile.open(path).tensors.values())
    for length in range(last_data_byte):
        refusal(tmp_path, contents[:length])


def test_unsupported_formats_are_named(tmp_path: Path) -> None:
    contents = build(tensor("x", (256,), TYPE_IQ2_XXS), tensors=1, data=bytes(96))
    message = refusal(tmp_path, contents, UnsupportedModelError)
    assert "tensor 'x' is stored as IQ2_XXS; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1" in message
    contents = build(tensor("x", (256,), 9999), tensors=1, data=bytes(96))
    assert "is stored as GGML type 9999" in refusal(tmp_path, contents, UnsupportedModelError)


def test_messages_stay_short(tmp_path: Path) -> None:
    contents = build(tensor("\0" * 60000, ()), tensors=1, data=bytes(96))
    assert len(refusal(tmp_path, contents)) < 250


TINY = 20_000
GREEDY_HEADERS = {
    "entries": build(*(entry(f"{index:x}", U16, b"\0\2") for index in range(TINY)), entries=TINY),
    "empty arrays": build(*(entry(f"{index:x}", ARRAY, array(U8, 0, b"")) for index in range(TINY)), entries=TINY),
    "strings": build(entry("a", ARRAY, array(STRING, TINY, string("é東") * TINY)), entries=1),
    "small numbers": build(entry("a", ARRAY, array(I8, TINY, b"\x80" * TINY)), entries=1),
    "tensors": build(
        *(tensor(f"{index:x}", (8,), offset=32 * index) for index in range(TINY)),
        tensors=TINY,
        data=bytes(32 * TINY),
    ),
}


@pytest.mark.parametrize("case", GREEDY_HEADERS)
def test_memory_is_a_small_multiple_of_the_header(tmp_path: Path, case: str) -> None:
    path = tmp_path / NAME
    path.write_bytes(GREEDY_HEADERS[case])
    header_bytes = len(GREEDY_HEADERS[case]) - (32 * TINY if case == "tensors" else 0)
    tracemalloc.start()
    try:
        GGUFFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_PER_HEADER_BYTE * header_bytes + 65536
