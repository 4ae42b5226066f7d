"""What other busy processes cost on a CPU: the same work on a quiet machine and beside some that never rest.

With two cores and two busy processes, fair shares are half of each core: twice the time would be fair. What comes on
top is waiting for threads that the system does not run.

    python bench/busy.py [--beside 2] [--repeats 3] [--quiet]

`command` is a whole `ramify generate "Hello" -n 4 --max-tokens 16`, in seconds; `one` and `fan8` are steps of one and
of eight sequences of the default model, in ms. Quiet and busy runs take turns, and medians are compared. --quiet waits
before each quiet run until nobody else computes here. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_process import wait_until_quiet  # type: ignore[import-not-found]
from machine import commit, machine_name  # type: ignore[import-not-found]

from ramify import LLM, SamplingParams

COMMAND = [sys.executable, "-c", "from ramify.cli import main; main()"]
GOAL = 2.5


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def command() -> float:
    arguments = ["generate", "Hello", "-n", "4", "--max-tokens", "16"]
    start = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], capture_output=True, check=True)
    return time.perf_counter() - start


def steps(llm: LLM, rows: int, count: int) -> float:
    params = SamplingParams(n=rows, max_tokens=count, ignore_eos=True, temperature=1.0)
    start = time.perf_counter()
    llm.generate("Once upon a time", params, use_tqdm=False)
    return (time.perf_counter() - start) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--beside", metavar="N", type=int, default=2, help="busy processes")
    parser.add_argument("--repeats", metavar="N", type=int, default=3)
    parser.add_argument("--quiet", action="store_true", help="wait for a quiet machine before each quiet run (Linux)")
    options = parser.parse_args()
    llm = LLM()
    steps(llm, 8, 8)  # warms up
    works: dict[str, Callable[[], float]] = {
        "command": command,
        "one": lambda: steps(llm, 1, 64),
        "fan8": lambda: steps(llm, 8, 32),
    }
    told: dict[str, dict[str, float]] = {}
    print(f"{'':<10}{'quiet':>10}{'busy':>10}{'ratio':>8}   beside {options.beside}; goal: {GOAL}")
    for name, work in works.items():
        times: dict[str, list[float]] = {"quiet": [], "busy": []}
        for _ in range(options.repeats):
            if options.quiet:
                wait_until_quiet()
            times["quiet"].append(work())
            with busy(options.beside):
                times["busy"].append(work())
        medians = {kind: statistics.median(each) for kind, each in times.items()}
        told[name] = {**medians, "ratio": medians["busy"] / medians["quiet"]}
        print(f"{name:<10}{medians['quiet']:10.2f}{medians['busy']:10.2f}{told[name]['ratio']:8.2f}")
    load = os.getloadavg()[0]
    facts = {"beside": options.beside, "load": round(load, 1), "machine": machine_name(), "commit": commit()}
    rounded = {name: {key: round(value, 3) for key, value in each.items()} for name, each in told.items()}
    print(json.dumps({"engine": "ramify", "workload": "busy", **rounded, **facts}))


if __name__ == "__main__":
    main()
