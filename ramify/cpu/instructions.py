"""Sets of instructions: what the CPU's kernels are compiled for, and which of them a processor has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ramify.errors import InvalidInputError

VARIABLE = "RAMIFY_CPU_KERNELS"
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    name: str  # as the variable has it, and the files of a wheel
    title: str  # as people call it
    options: tuple[str, ...]  # of the compiler
    needs: frozenset[str] = frozenset()  # of the flags by which Linux names what a processor can do


# Each option names one extension, so that nothing is needed that is not asked for.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_NEEDS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_NEEDS_AVX512 = _NEEDS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

AVX512_VNNI = InstructionSet(
    "avx512_vnni", "AVX-512 with VNNI", (*_AVX512, "-mavx512vnni"), _NEEDS_AVX512 | {"avx512_vnni"}
)
AVX512 = InstructionSet("avx512", "AVX-512", _AVX512, _NEEDS_AVX512)
AVX2 = InstructionSet("avx2", "AVX2", _AVX2, _NEEDS_AVX2)
NATIVE = InstructionSet("native", "this processor", ("-march=native",))
PLAIN = InstructionSet("plain", "any processor", ())
COMMON = (AVX512_VNNI, AVX512, AVX2)  # those that many processors have, the widest first


def processor_flags() -> frozenset[str]:
    """Of the first processor; none where the system does not tell."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def fitting(flags: Iterable[str]) -> list[InstructionSet]:
    """Of the common ones those that a processor has, the widest first."""
    has = frozenset(flags)
    return [each for each in COMMON if each.needs <= has]


def asked_for() -> InstructionSet | None:
    """What the environment asks for; what this processor lacks is refused, since it would end the process."""
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    known = {each.name: each for each in (*COMMON, NATIVE)}
    if name not in known:
        raise InvalidInputError(f"{VARIABLE} must be one of {', '.join(known)}; got {name!r}")
    lacking = known[name].needs - processor_flags()
    if lacking:
        raise InvalidInputError(f"{VARIABLE}={name}, but this processor lacks {', '.join(sorted(lacking))}")
    return known[name]
