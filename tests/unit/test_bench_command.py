"""`ramify bench`: there in a checkout alone, and what it says of engines that cannot run and of Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

START = """
import sys
from engine_process import Engine

engine = Engine("no-such-engine", sys.argv[1], "folder")
print(engine.wait_ready(), engine.trouble)
engine.close()
"""

STOPPED = """
import offline

def compare(options, results):
    results["one"] = {"ramify": 40.0, "floor": 50.0, "transformers": 20.0}
    results["fan8@64"] = {}
    raise KeyboardInterrupt

offline.compare = compare
offline.main()
"""


def run(
    code: str, *arguments: str, path: Path = ROOT / "bench", columns: int = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "COLUMNS": str(columns), "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    assert run(START, sys.executable).stdout == "False KeyError: 'no-such-engine'\n"
    python = tmp_path / "python"
    assert run(START, str(python)).stdout == f"False {python} cannot be run: No such file or directory\n"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'vllm'\" >&2\nexit 1\n")
    python.chmod(0o755)
    assert f"it is not installed for {python} (" in run(START, str(python)).stdout


def test_ctrl_c_reports_what_was_measured() -> None:
    done = run(STOPPED)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "generated tokens per second" in done.stdout
    assert "transformers 20.0: 2.00x" in done.stdout


def test_help_names_the_command_and_fits_a_terminal() -> None:
    help_page = "import sys; sys.argv = ['offline.py', '--help']; import offline; offline.main()"
    shown = run(help_page, columns=80).stdout
    assert shown.startswith("usage: ramify bench ")
    assert max(map(len, shown.splitlines())) <= 80


def test_the_command_is_there_where_the_benchmarks_are(tmp_path: Path) -> None:
    help_page = "import sys; sys.argv = ['ramify', '--help']; from ramify.cli import main; main()"
    assert "  bench  " in run(help_page).stdout
    (tmp_path / "ramify").symlink_to(ROOT / "ramify")  # as a wheel has it: the package alone
    installed = run(help_page, path=tmp_path)
    assert "  generate  " in installed.stdout
    assert "bench" not in installed.stdout
