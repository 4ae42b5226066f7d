"""Where and on what a benchmark ran, for its line of results."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine_name() -> str:
    return f"{processor_name()}, {os.cpu_count()} cores"


def commit() -> str:
    """Of the checkout that the benchmark is in; empty where there is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
