"""Offline generation on a CPU: Ramify and its rivals on the same work, in turns, in one run.

Regimes: `one` is bound by reading the weights once per token; `fan8@64` reads them once for eight tokens; `fan64@1k`
and `mixed32` are bound by arithmetic, and by how often a shared or a long prompt is read. The floor printed beside each
result is what the matrix products alone would take, measured in the same run.

    python bench/offline.py [--workloads one fan8@64 …] [--rivals transformers vllm llama.cpp] [--repeats 2]

A rival runs if its package is installed; --vllm-python and --llama-cpp-python name the interpreters of other
environments that have it. llama.cpp (llama-cpp-python) runs only `one`, on the default model with 4-bit weights: not
the same work, but it shows what reading less would bring.

Engines take turns, run by run, and the best run of each counts. The last line is JSON; --save appends results to a
file. --quiet waits before each run until nobody else computes here, and repeats runs that others disturbed: one other
busy process takes half of an engine's cores, and threads that wait for each other then run many times slower.
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

from ramify.models import embedded

QUIET_SECONDS = 600  # how long to wait for a quiet machine
DISTURBED = 0.05  # share of the machine's time that others may take during a run
ATTEMPTS = 8  # at a run that others disturb

GOALS = {"one": 1.4, "fan8@64": 1.4, "fan64@1k": 3.0, "mixed32": 1.2}  # times vLLM
GOALS_TRANSFORMERS = {"one": 2.0, "fan8@64": 2.0}
RIVALS = ("transformers", "vllm", "llama.cpp")


class Engine:
    """An adapter in a process of its own, asked for one run at a time."""

    def __init__(self, name: str, python: str, folder: str) -> None:
        self.name = name
        command = [python, str(Path(__file__).with_name("engines.py")), name, folder]
        # A process group of its own, so that an engine's helper processes are stopped and ended with it.
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
        return None if answer is None or "cannot" in answer else answer["tokens"] / answer["seconds"]

    def run_quietly(self, workload: str) -> float | None:
        """As run, but begins on a quiet machine and repeats while others disturb it."""
        speed = None
        for _ in range(ATTEMPTS):
            wait_until_quiet()
            start, busy, own = time.perf_counter(), _busy_seconds(), self._cpu_seconds()
            speed = self.run(workload)
            if speed is None:
                return None
            others = (_busy_seconds() - busy) - (self._cpu_seconds() - own)
            share = others / (time.perf_counter() - start) / (os.cpu_count() or 1)
            if share <= DISTURBED:
                return speed
            print(f"{self.name} on {workload}: others took {share:.0%} of the machine, again", file=sys.stderr)
        return speed

    def _cpu_seconds(self) -> float:
        """Processor time of the engine and its helpers so far."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = file.read_text().rpartition(")")[2].split()  # after the name: state, parent, process group, …
                if int(fields[2]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])  # in user code, in the system
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def wait_until_quiet() -> None:
    """Waits until the machine has been idle for two seconds."""
    end = time.monotonic() + QUIET_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        busy = _busy_seconds()
        time.sleep(1)
        quiet = quiet + 1 if _busy_seconds() - busy < DISTURBED * (os.cpu_count() or 1) else 0


def _busy_seconds() -> float:
    """Processor time of all processes so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system = fields[:3]
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def floor_tok_s(workload: Workload) -> float:
    """Tokens per second if only the matrix products of steps and prompts took time, each in its fastest form."""
    import torch

    from ramify.cpu.compiler import NoCompilerError
    from ramify.cpu.library import load
    from ramify.cpu.panels import PackedLinear
    from ramify.models.linear import Linear, may_pack

    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30
    layers = [Linear(torch.randn(*shape)) for shape in shapes]
    head = Linear(torch.randn(49_152, 576))
    for linear in (*layers, head):
        linear.may_pack = may_pack(linear.weight, 0)

    forms = ["linear", "transposed", "chosen"]
    packed: dict[int, PackedLinear] = {}
    with contextlib.suppress(NoCompilerError):
        library = load(lambda _: None)
        packed = {id(linear): PackedLinear(library, linear) for linear in (*layers, head)}
        forms.append("panels")

    def multiply(form: str, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
        match form:
            case "linear":
                torch.mm(x, linear.weight.t(), out=out)
            case "transposed":
                _ = linear.weight @ x.t()
            case "chosen":
                linear.product(x)
            case "panels":
                packed[id(linear)].multiply(x, out)

    def seconds(rows: int, linears: list[Linear]) -> float:
        inputs = {columns: torch.randn(rows, columns) for columns in (576, 1536)}
        outputs = {len(linear.weight): torch.empty(rows, len(linear.weight)) for linear in linears}
        best = float("inf")
        for form in forms * 2:
            start = time.perf_counter()
            for linear in linears:
                outputs_of, columns = linear.weight.shape
                multiply(form, linear, inputs[columns], outputs[outputs_of])
            best = min(best, time.perf_counter() - start)
        return best

    prompt_tokens = sum(len(prompt) for prompt in workload.prompts())
    at_once = min(prompt_tokens, 1024)
    prefill = seconds(at_once, layers) * prompt_tokens / at_once  # of a prompt only the last position needs the head
    decode = workload.output * seconds(workload.num_prompts * workload.n, [*layers, head])
    return float(workload.num_tokens / (prefill + decode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(CPU_WORKLOADS), default=list(CPU_WORKLOADS))
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=["transformers"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm-python", default=os.environ.get("RAMIFY_BENCH_VLLM_PYTHON", sys.executable))
    parser.add_argument("--llama-cpp-python", default=sys.executable)
    parser.add_argument("--quiet", action="store_true", help="run only while nobody else computes here (Linux)")
    parser.add_argument("--save", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL_SHAPE))
        engines = [Engine("ramify", sys.executable, folder)]
        pythons = {"vllm": options.vllm_python, "llama.cpp": options.llama_cpp_python}
        for name in options.rivals:
            model = str(embedded.fetch()) if name == "llama.cpp" else folder
            engines.append(Engine(name, pythons.get(name, sys.executable), model))
        ready = []
        for engine in engines:
            if engine.wait_ready():
                ready.append(engine)
                print(f"{engine.name} is ready after {engine.ready_seconds:.1f} s", file=sys.stderr)
            else:
                print(f"{engine.name} could not be started here", file=sys.stderr)
        results = measure(options.workloads, ready, options.repeats, quiet=options.quiet)
        for engine in engines:
            engine.close()
    report(results)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": "python bench/offline.py "
        + " ".join(sys.argv[1:]).split(" --vllm-python")[0].split(" --llama-cpp-python")[0].strip(),
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


def measure(workloads: list[str], engines: list[Engine], repeats: int, *, quiet: bool) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for name in workloads:
        row = results.setdefault(name, {})
        for turn in range(repeats + 1):  # the first turn warms up
            for engine in engines:
                speed = None
                if not (engine.name == "transformers" and name not in GOALS_TRANSFORMERS):
                    if quiet:
                        wait_until_quiet()
                    speed = engine.run_quietly(name) if quiet and turn > 0 else engine.run(name)
                if speed is not None and turn > 0:
                    row[engine.name] = max(row.get(engine.name, 0.0), speed)
            if quiet:
                wait_until_quiet()
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
        for rival, goals in (("vllm", GOALS), ("transformers", GOALS_TRANSFORMERS), ("llama.cpp", {})):
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
