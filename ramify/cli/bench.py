"""`ramify bench`: the benchmarks of the repository, where the command runs from one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from ramify.errors import RamifyError


def bench(context: typer.Context) -> None:
    """Compare with rivals on the CPU workloads; further arguments go to bench/offline.py (try -- --help)."""
    script = Path(__file__).parents[2] / "bench" / "offline.py"
    if not script.exists():
        raise RamifyError("the benchmarks are part of the repository, not of the installed package: clone it")
    raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)
