"""Offline generation on a CPU: Ramify and its rivals on the same work, in turns, in one run.

Regimes: `one` is bound by reading the weights once per token; `fan8@64` reads them once for eight; `fan64@1k` and
`mixed32` by arithmetic, and by how often a shared or a long prompt is read. The floor printed beside each result is
what the matrix products alone would take, measured here and now with torch.

    python bench/offline.py [--workloads one fan8@64 …] [--rivals transformers vllm] [--repeats 2]

A rival runs where its package is installed; --vllm-python names the interpreter of another environment that has it.
Engines take turns, run by run, and the best of each counts. The last line is JSON; --save appends results to a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workloads import CPU_WORKLOADS, MODEL_SHAPE, Workload  # type: ignore[import-not-found]

GOALS = {"one": 1.4, "fan8@64": 1.4, "fan64@1k": 3.0, "mixed32": 1.2}  # times vLLM
GOALS_TRANSFORMERS = {"one": 2.0, "fan8@64": 2.0}


class Engine:
    """An adapter in a process of its own, asked for one run at a time."""

    def __init__(self, name: str, python: str, folder: str) -> None:
        self.name = name
        command = [python, str(Path(__file__).with_name("engines.py")), name, folder]
        # A group of its own: an engine's helper processes are stopped and ended with it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.ready_seconds: float | None = None

    def wait_ready(self) -> bool:
        answer = self._answer()
        if answer is None:
            return False
        self.ready_seconds = answer["ready"]
        self._signal(signal.SIGSTOP)
        return True

    def run(self, workload: str) -> float | None:
        """Tokens per second, or None if the engine cannot. Between runs it is stopped: idle engines may still spin."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(workload + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return None if answer is None else answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def floor_tok_s(workload: Workload) -> float:
    """Tokens per second if matrix products were all there is: each step's, and the prompts'."""
    import torch

    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    weights = [[torch.randn(*shape) for shape in shapes] for _ in range(30)]
    head = torch.randn(49_152, 576)

    def seconds(rows: int) -> float:
        inputs = {columns: torch.randn(rows, columns) for columns in (576, 1536)}
        best = float("inf")
        for turned in (False, True, False, True):
            start = time.perf_counter()
            for weight in [weight for layer in weights for weight in layer]:
                _ = weight @ inputs[weight.shape[1]].t() if turned else inputs[weight.shape[1]] @ weight.t()
            _ = head @ inputs[576].t() if turned else inputs[576] @ head.t()
            best = min(best, time.perf_counter() - start)
        return best

    prompt_tokens = sum(len(prompt) for prompt in workload.prompts())
    prefill = seconds(min(prompt_tokens, 1024)) * prompt_tokens / min(prompt_tokens, 1024)
    decode = workload.output * seconds(workload.num_prompts * workload.n)
    return float(workload.num_tokens / (prefill + decode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(CPU_WORKLOADS), default=list(CPU_WORKLOADS))
    parser.add_argument("--rivals", nargs="*", choices=["transformers", "vllm"], default=["transformers"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm-python", default=os.environ.get("RAMIFY_BENCH_VLLM_PYTHON", sys.executable))
    parser.add_argument("--save", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL_SHAPE))
        engines = [Engine("ramify", sys.executable, folder)]
        for name in options.rivals:
            engines.append(Engine(name, options.vllm_python if name == "vllm" else sys.executable, folder))
        ready = []
        for engine in engines:
            if engine.wait_ready():
                ready.append(engine)
                print(f"{engine.name} is ready after {engine.ready_seconds:.1f} s", file=sys.stderr)
            else:
                print(f"{engine.name} could not be started here", file=sys.stderr)
        results = measure(options.workloads, ready, options.repeats)
        for engine in engines:
            engine.close()
    report(results)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": "python bench/offline.py " + " ".join(sys.argv[1:]).split("--vllm-python")[0].strip(),
    }
    lines = [
        {"engine": engine, "workload": workload, "tok_s": round(value, 1), **facts}
        for workload, row in results.items()
        for engine, value in row.items()
    ]
    if options.save:
        with options.save.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(json.dumps({"results": results, **facts}))


def measure(workloads: list[str], engines: list[Engine], repeats: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for name in workloads:
        row = results.setdefault(name, {})
        for turn in range(repeats + 1):  # the first turn warms up
            for engine in engines:
                speed = None
                if not (engine.name == "transformers" and name not in GOALS_TRANSFORMERS):
                    speed = engine.run(name)
                if speed is not None and turn > 0:
                    row[engine.name] = max(row.get(engine.name, 0.0), speed)
            if turn > 0:
                row["floor"] = max(row.get("floor", 0.0), floor_tok_s(CPU_WORKLOADS[name]))
        print(f"{name}: {row}", file=sys.stderr)
    return results


def report(results: dict[str, dict[str, float]]) -> None:
    print(
        f"{'workload':<10}{'ramify':>9}{'floor':>9}{'of it':>7}   tok/s of rivals, and how many times faster Ramify is"
    )
    for name, row in results.items():
        own, floor = row.get("ramify", 0.0), row.get("floor", float("nan"))
        rivals = []
        for rival, goals in (("vllm", GOALS), ("transformers", GOALS_TRANSFORMERS)):
            if rival in row:
                goal = f" (goal {goals[name]}x)" if name in goals else ""
                rivals.append(f"{rival} {row[rival]:.1f}: {own / row[rival]:.2f}x{goal}")
        print(f"{name:<10}{own:9.1f}{floor:9.1f}{own / floor:7.0%}   {'; '.join(rivals)}")


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
