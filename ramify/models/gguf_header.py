"""A strict parser of what comes before the weights of a GGUF file.

    magic, version, counts | key, type, value ... | name, dims, type, offset ... | padding | tensor data
    `------------------------------- the header -------------------------------'

Every count and length is compared with the number of bytes left before anything is read or allocated for it. So the
time for parsing is proportional to the header's size, and the memory is at most `MEMORY_PER_HEADER_BYTE` times that
size (for a great many tiny entries; a vocabulary takes about five times its size). Tensor data is not read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ramify.errors import FileFormatError, ModelNotFoundError, UnsupportedModelError
from ramify.models.number_formats import GGUF_FORMATS, GGUF_FORMATS_BY_TYPE_ID, type_name

MEMORY_PER_HEADER_BYTE = 16

MAGIC = b"GGUF"
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(1 << power for power in range(3, 17))

# The smallest metadata entry: key length, one letter, type, value. The smallest tensor entry: name length, one letter,
# number of dims, one dim, type, offset.
MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_U32 = Struct("<I")
_U64 = Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBER_CODES = ((0, "u1"), (1, "i1"), (2, "<u2"), (3, "<i2"), (4, "<u4"), (5, "<i4"), (6, "<f4"))
_WIDE_NUMBER_CODES = ((10, "<u8"), (11, "<i8"), (12, "<f8"))
_NUMBERS = MappingProxyType({number: np.dtype(code) for number, code in _NUMBER_CODES + _WIDE_NUMBER_CODES})

NumberArray: TypeAlias = npt.NDArray[np.generic]
# Scalars and strings are plain Python values. Arrays of numbers or booleans stay read-only numpy arrays of the stored
# width: in a Python list, small numbers would take forty times the memory.
MetadataValue: TypeAlias = int | float | bool | str | list[str] | NumberArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor's bytes are: inside the file, as was checked, and in no other tensor."""

    name: str
    shape: tuple[int, ...]  # in torch's order, which is GGUF's reversed
    quantization: str
    offset: int  # in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A mapped file and what its header says: sound, and every tensor lies inside the file."""

    path: Path
    contents: mmap.mmap
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path) -> GGUFHeader:
        """Raises a ModelError that names the file if it cannot be used."""
        path = Path(path)
        contents = map_file(path)
        try:
            return cls(path, contents, *read_header(path.name, contents))
        except BaseException:
            contents.close()
            raise


def map_file(path: Path) -> mmap.mmap:
    if not path.is_file():
        raise ModelNotFoundError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise FileFormatError(f"{path.name}: the file is empty")
            # A private copy-on-write map, because torch wants writable memory.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error


def read_header(file_name: str, contents: mmap.mmap) -> tuple[dict[str, MetadataValue], dict[str, TensorInfo]]:
    """Metadata and tensors; raises FileFormatError or UnsupportedModelError, naming the file."""
    cursor = _Cursor(file_name, contents)
    num_tensors, num_entries = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_entries)
    return metadata, _read_tensor_infos(cursor, num_tensors, _alignment(cursor, metadata))


class _Cursor:
    """A reading position in the file that only moves forward, and never past the end."""

    def __init__(self, file_name: str, contents: mmap.mmap) -> None:
        self.file_name = file_name
        self.contents = contents
        self.size = len(contents)
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise FileFormatError(f"{self.file_name}: {what}")

    def skip(self, num_bytes: int, what: str) -> int:
        """Moves past `num_bytes`, which must be there; returns where they start."""
        start = self.position
        if num_bytes > self.size - start:
            self.fail(f"{what} needs {num_bytes} bytes at {start}, but {self.size - start} are left")
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        number: int = _U32.unpack_from(self.contents, self.skip(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = _U64.unpack_from(self.contents, self.skip(8, what))[0]
        return number

    def count(self, min_bytes_each: int, what: str) -> int:
        """A u64 that says how many entries follow; refused if so many cannot fit."""
        count = self.u64(f"the number of {what}")
        left = self.size - self.position
        if count > left // min_bytes_each:
            self.fail(f"{count} {what} are claimed, but only {left} bytes are left")
        return count

    def strings(self, count: int, what: str) -> list[str]:
        """The next strings. Start-up waits for this loop (a vocabulary and its merges), hence the local names."""
        contents, size, position = self.contents, self.size, self.position
        unpack_length = _U64.unpack_from
        values: list[str] = []
        append = values.append
        for _ in range(count):
            start = position + 8
            if start > size:
                self.fail(f"{what} is cut off at {position}")
            (length,) = unpack_length(contents, position)
            position = start + length
            if position > size:
                self.fail(f"{what} at {start} claims {length} bytes, but {size - start} are left")
            try:
                append(contents[start:position].decode())
            except UnicodeDecodeError:
                self.fail(f"{what} at {start} is not UTF-8")
        self.position = position
        return values

    def key(self, what: str) -> str:
        start = self.position
        key = self.strings(1, what)[0]
        num_bytes = self.position - start - 8
        if not 1 <= num_bytes <= MAX_KEY_BYTES:
            self.fail(f"{what} at {start} has {num_bytes} bytes; 1 to {MAX_KEY_BYTES} are allowed")
        return key

    def numbers(self, count: int, dtype: np.dtype[np.generic], what: str) -> NumberArray:
        start = self.skip(count * dtype.itemsize, what)
        # Slicing copies, so no array keeps the file mapped; and an array over bytes is read-only.
        return np.frombuffer(self.contents[start : self.position], dtype=dtype, count=count)

    def booleans(self, count: int, what: str) -> npt.NDArray[np.bool_]:
        start = self.skip(count, what)
        values = np.frombuffer(self.contents[start : self.position], dtype=np.uint8, count=count)
        if count and values.max() > 1:
            self.fail(f"{what} should be boolean, but is neither 0 nor 1")
        return values.view(np.bool_)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns the numbers of tensors and of metadata entries."""
    magic = cursor.contents[: len(MAGIC)]
    if magic != MAGIC:
        cursor.fail(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    cursor.skip(len(MAGIC), "the magic")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if 0 < swapped < 1 << 8:
            cursor.fail(f"GGUF version {swapped} in big-endian byte order; only little-endian is supported")
        cursor.fail(f"GGUF version {version}; supported versions are 2 and 3")
    num_tensors = cursor.count(MIN_TENSOR_BYTES, "tensors")
    return num_tensors, cursor.count(MIN_ENTRY_BYTES, "metadata entries")


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_entries):
        key = cursor.key("a metadata key")
        what = quote(key)
        if key in metadata:
            cursor.fail(f"the metadata key {what} appears twice")
        metadata[key] = _read_value(cursor, cursor.u32(f"the type of {what}"), what)
    return metadata


def _read_value(cursor: _Cursor, value_type: int, what: str) -> MetadataValue:
    if value_type in _NUMBERS:
        number: int | float = cursor.numbers(1, _NUMBERS[value_type], what)[0].item()
        return number
    if value_type == _STRING:
        return cursor.strings(1, what)[0]
    if value_type == _BOOL:
        return bool(cursor.booleans(1, what)[0])
    if value_type == _ARRAY:
        return _read_array(cursor, cursor.u32(f"the element type of {what}"), what)
    return cursor.fail(f"{what} has the unknown value type {value_type}")


def _read_array(cursor: _Cursor, element_type: int, what: str) -> list[str] | NumberArray:
    if element_type in _NUMBERS:
        dtype = _NUMBERS[element_type]
        return cursor.numbers(cursor.count(dtype.itemsize, f"numbers in {what}"), dtype, what)
    if element_type == _STRING:
        return cursor.strings(cursor.count(8, f"strings in {what}"), what)
    if element_type == _BOOL:
        return cursor.booleans(cursor.count(1, f"booleans in {what}"), what)
    if element_type == _ARRAY:
        cursor.fail(f"{what} is an array of arrays, which Ramify does not read")
    return cursor.fail(f"{what} is an array of the unknown value type {element_type}")


def _alignment(cursor: _Cursor, metadata: dict[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment not in ALIGNMENTS:
        first, *_, last = ALIGNMENTS
        cursor.fail(f"general.alignment is {quote(alignment)}, not a power of two from {first} to {last}")
    return alignment


def _read_tensor_infos(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        info = _read_tensor_info(cursor)
        if info.name in tensors:
            cursor.fail(f"the tensor name {quote(info.name)} appears twice")
        if info.offset % alignment:
            cursor.fail(f"tensor {quote(info.name)} has offset {info.offset}, not a multiple of {alignment}")
        tensors[info.name] = info
    # Offsets count from the first aligned byte after the header, which is known only now.
    data_start = -(-cursor.position // alignment) * alignment
    for name, info in tensors.items():
        tensors[name] = replace(info, offset=data_start + info.offset)
    _check_extents(cursor, tensors.values())
    return tensors


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    """One entry of the table; its offset is still relative to the start of the data."""
    name = cursor.key("a tensor name")
    what = f"tensor {quote(name)}"
    num_dims = cursor.u32(f"the number of dims of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"{what} has {num_dims} dims; 1 to {MAX_DIMS} are allowed")
    shape = tuple(reversed([cursor.u64(f"a dim of {what}") for _ in range(num_dims)]))
    type_id = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")
    if 0 in shape:
        cursor.fail(f"{what} of shape {shape} is empty")
    quant_format = GGUF_FORMATS_BY_TYPE_ID.get(type_id)
    if quant_format is None:
        raise UnsupportedModelError(
            f"{cursor.file_name}: {what} is stored as {type_name(type_id)}; supported are "
            f"{', '.join(each.name for each in GGUF_FORMATS)}"
        )
    if shape[-1] % quant_format.block_size:
        cursor.fail(
            f"{what} has rows of {shape[-1]} weights, not whole {quant_format.name} blocks of {quant_format.block_size}"
        )
    num_bytes = prod(shape) // quant_format.block_size * quant_format.block_bytes
    return TensorInfo(name, shape, quant_format.name, offset, num_bytes)


def _check_extents(cursor: _Cursor, tensors: Iterable[TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(tensors, key=lambda each: each.offset):
        if info.offset < end:
            cursor.fail(f"tensors {quote(before)} and {quote(info.name)} overlap at {info.offset}")
        end, before = info.offset + info.num_bytes, info.name
        if end > cursor.size:
            cursor.fail(
                f"tensor {quote(info.name)} of shape {info.shape} ends at {end}, "
                f"but the file is cut off at {cursor.size}"
            )


def quote(value: object) -> str:
    """The value in quotes, for a message; cut short if a hostile file made it long."""
    text = repr(value[:81] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."
