"""`bench/soak.py` as people run it: thousands of clients on one server, for one and for two HTTP processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "soak.py"


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_thousands_of_clients_are_not_mixed_up_and_leave_nothing_behind(workers: str) -> None:
    sizes = ["--streams", "2000", "--leavers", "500", "--requests", "4000", "--clients", "500"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, "--http-workers", workers],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines, done.stderr)
    streams, leavers, _, kill = lines
    assert (streams["streams"], streams["lost"], streams["mixed_up"]) == (2_000, 0, 0)
    assert leavers["blocks_in_use"] == 0
    assert kill["exit_status"] == 1
