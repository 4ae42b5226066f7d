"""`ramify bench`: the benchmarks of the repository, where the command runs from one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

# Beside the package in a checkout; an installed wheel has no benchmarks, and then no such command.
SCRIPT = Path(__file__).parents[2] / "bench" / "offline.py"


def bench(context: typer.Context) -> None:
    """Measure speed beside other engines, on a CPU."""
    # The benchmark takes this process's place, so that Ctrl-C is its own to handle.
    os.execv(sys.executable, [sys.executable, str(SCRIPT), *context.args])
