"""The CPU's kernels for tests: compiled for this machine's vectors, and for the narrower ones of other machines."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest

from ramify.cpu.instructions import AVX2, NATIVE, PLAIN, InstructionSet, processor_flags
from ramify.cpu.library import Library, load

EVERY_SET = [NATIVE, AVX2, PLAIN]  # vectors of 16, 8 and 4 numbers, where the machine has them

needs_compiler = pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="no g++ here")


def library_for(instructions: InstructionSet) -> Library:
    if instructions is not NATIVE and (platform.machine() != "x86_64" or not instructions.needs <= processor_flags()):
        pytest.skip(f"this machine cannot run {instructions.title}")
    return load(lambda _: None, instructions)
