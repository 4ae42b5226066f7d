"""A benchmark in this tree and in another one, in turns: what tells two commits apart on a machine that drifts.

    git worktree add ../before COMMIT
    python bench/alternate.py ../before --runs 10 -- bench/step.py --shape 0.6B --rows 256

Each run is a process of its own, and its last line must be JSON. Prints the median of every number that both trees
report, and their ratio (this tree : the other). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]


def run(tree: Path, command: list[str]) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode} in {tree}:\n{done.stderr[-2000:]}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: float(value) for name, value in facts.items() if type(value) in (int, float)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", type=Path, help="the other tree")
    parser.add_argument("--runs", type=int, default=10, help="of each tree")
    parser.add_argument("command", nargs="+", help="a script of bench/ and its options, after --")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"here": [], "other": []}
    for number in range(options.runs):
        turns = [("here", HERE), ("other", options.other.resolve())]
        for name, tree in turns if number % 2 else reversed(turns):
            found[name].append(run(tree, options.command))
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()
    }
    print(f"{'median of ' + str(options.runs):<28}{'other':>12}{'here':>12}{'ratio':>8}")
    for key in medians["here"].keys() & medians["other"].keys():
        here, other = medians["here"][key], medians["other"][key]
        print(f"{key:<28}{other:12.3f}{here:12.3f}{here / other if other else float('nan'):8.3f}")
    print(json.dumps({"command": " ".join(options.command), "runs": options.runs, **medians}))


if __name__ == "__main__":
    main()
