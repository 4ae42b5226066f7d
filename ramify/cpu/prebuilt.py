"""The kernels that a wheel carries: one library for each common set of instructions, so that no compiler is needed.

A checkout has none: there they are compiled when they are first used (compiler.py).
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ramify.cpu.compiler import compile_library
from ramify.cpu.instructions import COMMON, InstructionSet

FOLDER = Path(__file__).parent / "prebuilt"
PLATFORM = "manylinux_2_28_x86_64"  # what a wheel that carries them says it runs on


def carried(instructions: InstructionSet) -> Path | None:
    """The library for these instructions, if this installation has it."""
    path = FOLDER / file_name(instructions)
    return path if sys.platform == "linux" and path.is_file() else None


def file_name(instructions: InstructionSet) -> str:
    return f"kernels-{instructions.name}.so"


def build_all(folder: Path) -> list[Path]:
    """Compiles what a wheel carries into a folder."""
    folder.mkdir(parents=True, exist_ok=True)

    def build(instructions: InstructionSet) -> Path:
        compile_library(folder, file_name(instructions), instructions, for_other_machines=True)
        return folder / file_name(instructions)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, COMMON))
