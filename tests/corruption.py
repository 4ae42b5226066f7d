"""Damaged variants of a sound file, the same ones for the same seed.

`corruptions` knows no format: it is told where the header ends and, if that is known, where the header keeps
its integers. `gguf_fields` finds them in a GGUF file; a safetensors file has one, the length at byte 0, and
its numbers are text, which `corruptions` also scribbles on.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ramify.errors import RamifyError

# Numbers that overflow, turn negative, exhaust memory, or are off by one.
ABSURD_NUMBERS = (0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

SECONDS_PER_FILE = 5
MEMORY_BOUND = 64 << 20  # bytes beyond the size of the file
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Field:
    """An unsigned little-endian integer in a header."""

    what: str
    offset: int
    size: int

    def read(self, data: bytes) -> int:
        return int.from_bytes(data[self.offset : self.offset + self.size], "little")

    def write(self, data: bytes, number: int) -> bytes:
        packed = (number % (1 << 8 * self.size)).to_bytes(self.size, "little")
        return data[: self.offset] + packed + data[self.offset + self.size :]


def corruptions(
    sound: bytes, *, header_bytes: int, fields: Sequence[Field] = (), count: int = 300, seed: int = 0
) -> Iterator[tuple[str, bytes]]:
    """`count` times (what was done, the bytes), each with one kind of damage, all kinds equally often.

    Truncations cut anywhere; all other damage is to the header, since damaged weights are still weights.
    Some variants may be sound: a flipped bit can turn one name into another.
    """
    generator = random.Random(seed)
    kinds = [_truncated, _truncated_header, _flipped, _overwritten, _moved, _spliced, _other_digit]
    if fields:
        kinds += [_absurd_field, _nudged_field, _swapped_fields, _copied_field]
    for index in range(count):
        kind = kinds[index % len(kinds)]
        what, damaged = kind(sound, header_bytes, fields, generator)
        yield f"{index}: {what}", damaged


def gguf_fields(sound: bytes) -> tuple[int, list[Field]]:
    """Where the header of a little-endian GGUF file ends, and the counts, lengths, types and offsets in it.

    The strings of an array are passed over: their lengths are found by the blind damage.
    """
    fields: list[Field] = []
    position = 4

    def integer(what: str, size: int) -> int:
        nonlocal position
        fields.append(Field(what, position, size))
        position += size
        return fields[-1].read(sound)

    def string(what: str) -> None:
        nonlocal position
        length = integer(f"length of {what}", 8)
        position += length

    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    integer("version", 4)
    num_tensors = integer("number of tensors", 8)
    for index in range(integer("number of entries", 8)):
        string(f"key {index}")
        value_type = integer(f"type of entry {index}", 4)
        if value_type == 8:
            string(f"value {index}")
        elif value_type == 9:
            element_type = integer(f"element type of entry {index}", 4)
            length = integer(f"array length of entry {index}", 8)
            for _ in range(length if element_type == 8 else 0):
                position += 8 + struct.unpack_from("<Q", sound, position)[0]
            position += length * sizes.get(element_type, 0)
        else:
            integer(f"value {index}", sizes[value_type])
    for index in range(num_tensors):
        string(f"tensor name {index}")
        for dim in range(integer(f"number of dims of tensor {index}", 4)):
            integer(f"dim {dim} of tensor {index}", 8)
        integer(f"type of tensor {index}", 4)
        integer(f"offset of tensor {index}", 8)
    return position, fields


def _truncated(sound: bytes, _header: int, _fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    length = generator.randrange(len(sound))
    return f"cut to {length} bytes", sound[:length]


def _truncated_header(
    sound: bytes, header: int, fields: Sequence[Field], generator: random.Random
) -> tuple[str, bytes]:
    """Cut before, inside or after a field, where off-by-one checks fail."""
    if fields:
        field = generator.choice(fields)
        length = field.offset + generator.choice((0, 1, field.size - 1, field.size))
    else:
        length = generator.randrange(header)
    return f"cut to {length} bytes, in the header", sound[:length]


def _flipped(sound: bytes, header: int, _fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    damaged = bytearray(sound)
    bits = [generator.randrange(8 * header) for _ in range(generator.choice((1, 1, 2, 16)))]
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    return f"bits {bits} flipped", bytes(damaged)


def _overwritten(sound: bytes, header: int, _fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    """A run of the header made random, all zeros or all ones."""
    start = generator.randrange(header)
    length = generator.choice((1, 4, 8, 64))
    filler = generator.choice((b"\0" * length, b"\xff" * length, generator.randbytes(length)))
    damaged = sound[:start] + filler[: header - start] + sound[min(start + length, header) :]
    return f"{length} bytes at {start} overwritten with {filler[:4].hex()}...", damaged


def _moved(sound: bytes, header: int, _fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    """One run of the header copied over another."""
    length = generator.choice((4, 8, 24))
    source, target = generator.randrange(header), generator.randrange(max(1, header - length))
    piece = sound[source : source + length]
    return (
        f"{length} bytes of {source} copied to {target}",
        sound[:target] + piece + sound[target + len(piece) :],
    )


def _spliced(sound: bytes, header: int, _fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    """Bytes taken out of the header or put into it, so that all after them is shifted."""
    start, length = generator.randrange(header), generator.choice((1, 3, 8, 32))
    if generator.random() < 0.5:
        return f"{length} bytes taken out at {start}", sound[:start] + sound[start + length :]
    return (
        f"{length} bytes put in at {start}",
        sound[:start] + generator.randbytes(length) + sound[start:],
    )


def _other_digit(sound: bytes, header: int, _fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    """A digit of a number written as text becomes another, a sign, a letter or a bracket."""
    places = [place for place in range(header) if sound[place : place + 1].isdigit()]
    place = generator.choice(places or [generator.randrange(header)])
    digit = generator.choice(b'0123456789-.eE[]{}" ')
    return f"{chr(digit)!r} written at {place}", sound[:place] + bytes([digit]) + sound[place + 1 :]


def _absurd_field(sound: bytes, _header: int, fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    field, number = generator.choice(fields), generator.choice((*ABSURD_NUMBERS, len(sound), len(sound) - 1))
    return f"{field.what} set to {number}", field.write(sound, number)


def _nudged_field(sound: bytes, _header: int, fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    """A little more or less: offsets that overlap, lengths that run into what follows."""
    field, step = generator.choice(fields), generator.choice((-64, -32, -8, -1, 1, 8, 32, 64))
    return f"{field.what} changed by {step}", field.write(sound, field.read(sound) + step)


def _swapped_fields(sound: bytes, _header: int, fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    first = generator.choice(fields)
    second = generator.choice([field for field in fields if field.size == first.size])
    damaged = second.write(first.write(sound, second.read(sound)), first.read(sound))
    return f"{first.what} and {second.what} swapped", damaged


def _copied_field(sound: bytes, _header: int, fields: Sequence[Field], generator: random.Random) -> tuple[str, bytes]:
    """One field takes another's number: two tensors at one offset, a type in the place of another."""
    target = generator.choice(fields)
    similar = [field for field in fields if field.size == target.size and field.what[:6] == target.what[:6]]
    source = generator.choice(similar)
    return f"{target.what} copied from {source.what}", target.write(sound, source.read(sound))


@dataclass(frozen=True, slots=True)
class Survival:
    """How many damaged files were refused or read, what else happened, and how much memory that took (bytes)."""

    refused: int
    readable: int
    failures: list[str]
    growth: int

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def survive(variants: Iterable[tuple[str, bytes]], path: Path, attempt: Callable[[Path], object]) -> Survival:
    """Writes each variant to `path` and tries it; anything but a reading or an error of ours is a failure.

    To be run in a process of its own, after one attempt on the sound file, so that the memory counted is its own.
    """
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, readable, failures = 0, 0, []
    for what, damaged in variants:
        path.write_bytes(damaged)
        signal.alarm(SECONDS_PER_FILE)  # no handler: a hang ends the process
        try:
            attempt(path)
            readable += 1
        except RamifyError as error:
            refused += 1
            if not str(error):
                failures.append(f"{what}: the message is empty")
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {error}")
        finally:
            signal.alarm(0)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024
    return Survival(refused, readable, failures, growth)


def survive_in_process(module: str, *arguments: Path | str) -> Survival:
    """Runs a test module's own `__main__`, which prints a Survival, in a fresh interpreter."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    return Survival(**json.loads(done.stdout.splitlines()[-1]))
