"""Offline generation on a CPU: Ramify and its rivals on the same work, in turns, in one run.

Regimes: `one` is bound by reading the weights once per token; `fan8@64` reads them once for eight tokens; `fan64@1k`
and `mixed32` are bound by arithmetic, and by how often a shared or a long prompt is read. The floor printed beside each
result is what the matrix products alone would take, measured in the same run.

    python bench/offline.py [--workloads one fan8@64 …] [--rivals transformers vllm llama.cpp] [--repeats 2]

A rival runs if its package is installed; --vllm-python and --llama-cpp-python name the interpreters of other
environments that have it. llama.cpp (llama-cpp-python) reads the embedded model's file; --gguf FILE (or --gguf alone:
the embedded one) lets Ramify read it too, exactly and with int8 activations. Other rivals do not read such files.

    python bench/offline.py --gguf --rivals llama.cpp --llama-cpp-python PATH --repeats 5 --quiet
    python bench/random_gguf.py 1b.gguf
    python bench/offline.py --gguf 1b.gguf --rivals llama.cpp --llama-cpp-python PATH --workloads one fan8@64

On a busy machine --processor-time divides by the time that an engine computed instead of the clock's.

All speeds are generated tokens per second. Engines take turns, run by run, and the best run of each counts. Ctrl-C
ends the run and reports what was measured until then. The last line is JSON; --save appends results to a file. --quiet
waits before each run until nobody else computes here, and repeats runs that others disturbed: one other busy process
takes half of an engine's cores, and threads that wait for each other then run many times slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_process import Engine, wait_until_quiet  # type: ignore[import-not-found]
from machine import processor_name  # type: ignore[import-not-found]
from workloads import CPU_WORKLOADS, MODEL_SHAPE, Workload  # type: ignore[import-not-found]

from ramify.models import embedded

GOALS = {"one": 1.4, "fan8@64": 1.4, "fan64@1k": 3.0, "mixed32": 1.2}  # times vLLM
GOALS_TRANSFORMERS = {"one": 2.0, "fan8@64": 2.0}
RIVALS = ("transformers", "vllm", "llama.cpp")
Results = dict[str, dict[str, float]]  # tokens per second, by workload and engine


def floor_tok_s(workload: Workload) -> float:
    """Tokens per second if only the matrix products of steps and prompts took time, each in its fastest form."""
    import torch

    from ramify.cpu.compiler import NoCompilerError
    from ramify.cpu.library import load
    from ramify.cpu.panels import PanelPacking, Product
    from ramify.models.linear import Linear, may_pack
    from ramify.models.stored import StoredTensor

    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30
    layers = [Linear(torch.randn(*shape)) for shape in shapes]
    head = Linear(torch.randn(49_152, 576))
    for linear in (*layers, head):
        linear.may_pack = may_pack(linear.weight, 0)

    forms = ["linear", "transposed", "chosen"]
    packed: dict[int, Product] = {}
    with contextlib.suppress(NoCompilerError):
        library = load(lambda _: None)
        for linear in (*layers, head):
            linear.put(0, StoredTensor.of(linear.weight), PanelPacking(library))
            packed[id(linear)] = Product(library, linear)
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
    parser = argparse.ArgumentParser(prog="ramify bench", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--workloads",
        nargs="+",
        metavar="NAME",
        choices=list(CPU_WORKLOADS),
        default=list(CPU_WORKLOADS),
        help=f"some of {', '.join(CPU_WORKLOADS)} (default: all)",
    )
    parser.add_argument(
        "--rivals",
        nargs="*",
        metavar="NAME",
        choices=RIVALS,
        default=["transformers"],
        help=f"some of {', '.join(RIVALS)}, or nothing (default: transformers)",
    )
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=2, help="runs of each, the best counts (default: 2)"
    )
    parser.add_argument(
        "--vllm-python",
        metavar="PATH",
        default=os.environ.get("RAMIFY_BENCH_VLLM_PYTHON", sys.executable),
        help="the interpreter of an environment that has vLLM",
    )
    parser.add_argument(
        "--llama-cpp-python", metavar="PATH", default=sys.executable, help="the same for llama-cpp-python"
    )
    parser.add_argument(
        "--gguf",
        metavar="FILE",
        nargs="?",
        const="",
        help="Ramify reads this file, or the embedded one, as llama.cpp does",
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="tokens per second of computing: on a busy machine"
    )
    parser.add_argument("--quiet", action="store_true", help="run only while nobody else computes here (Linux)")
    parser.add_argument("--save", metavar="FILE", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()
    if options.quiet and options.processor_time:
        parser.error("--quiet waits for a quiet machine, --processor-time is for a busy one")
    if options.gguf is not None and set(options.rivals) - {"llama.cpp"}:
        parser.error("--gguf compares with llama.cpp alone: --rivals llama.cpp, or --rivals without a name")

    results: Results = {}
    status = 0
    try:
        compare(options, results)
    except KeyboardInterrupt:
        status = 130
        told = "what was measured until now" if any(results.values()) else "nothing was measured until now"
        print(f"\nstopped: {told}", file=sys.stderr)
    if not any(results.values()):
        sys.exit(status or 1)
    report(results)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
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
    print(json.dumps({"unit": "tokens/s", "results": results, **facts}))
    sys.exit(status)


def compare(options: argparse.Namespace, results: Results) -> None:
    """Starts the engines, fills `results` while they take turns, and ends them, whatever happens."""
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_the_end:
        Path(folder, "config.json").write_text(json.dumps(MODEL_SHAPE))
        pythons = {"vllm": options.vllm_python, "llama.cpp": options.llama_cpp_python}
        print(f"starting {', '.join(('ramify', *options.rivals))} (some take a minute)", file=sys.stderr)
        own = ("ramify",) if options.gguf is None else ("ramify", "ramify int8")
        file = options.gguf or str(embedded.fetch())
        for name in (*own, *options.rivals):
            model = file if name == "llama.cpp" or options.gguf is not None else folder
            engines.append(Engine(name, pythons.get(name, sys.executable), model))
            at_the_end.callback(engines[-1].close)
        ready = []
        for engine in engines:
            if engine.wait_ready():
                ready.append(engine)
                print(f"{engine.name} is ready after {engine.ready_seconds:.1f} s", file=sys.stderr)
            else:
                print(f"{engine.name} is left out: {engine.trouble}", file=sys.stderr)
        if engines[0] in ready:
            clock = "processor_seconds" if options.processor_time else "seconds"
            measure(options.workloads, ready, options.repeats, results, quiet=options.quiet, clock=clock)


def measure(
    workloads: list[str], engines: list[Engine], repeats: int, results: Results, *, quiet: bool, clock: str
) -> None:
    for name in workloads:
        workload, row = CPU_WORKLOADS[name], results.setdefault(name, {})
        print(f"{name}: {describe(workload)}", file=sys.stderr)
        left_out = {
            engine.name for engine in engines if engine.name == "transformers" and name not in GOALS_TRANSFORMERS
        }
        for turn in range(repeats + 1):  # the first turn warms up
            for engine in engines:
                if engine.name in left_out:
                    continue
                if quiet:
                    wait_until_quiet()
                speed = engine.run_quietly(name) if quiet and turn > 0 else engine.run(name, clock)
                if speed is None:
                    left_out.add(engine.name)
                    print(f"  {engine.name} cannot: {engine.trouble}", file=sys.stderr)
                elif turn > 0:
                    row[engine.name] = max(row.get(engine.name, 0.0), speed)
            if quiet:
                wait_until_quiet()
            if turn > 0 and clock == "seconds":
                row["floor"] = max(row.get("floor", 0.0), floor_tok_s(workload))
        print("  " + ", ".join(f"{engine} {speed:.1f} tokens/s" for engine, speed in row.items()), file=sys.stderr)


def describe(workload: Workload) -> str:
    shortest, longest = workload.lengths
    lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    prompts = "1 prompt" if workload.num_prompts == 1 else f"{workload.num_prompts} prompts"
    samples = "1 sample" if workload.n == 1 else f"{workload.n} samples"
    each = "" if workload.num_prompts == 1 else " each"
    return f"{prompts} of {lengths} tokens, {samples} of {workload.output} tokens{each}"


def report(results: Results) -> None:
    print("generated tokens per second; `floor` is what the matrix products alone would allow")
    print(f"{'workload':<10}{'ramify':>9}{'floor':>9}{'of it':>7}   rivals, and how many times faster Ramify is")
    for name, row in results.items():
        if "ramify" not in row:
            continue  # stopped before its first result
        own, floor = row["ramify"], row.get("floor")
        bound = f"{'-':>9}{'-':>7}" if floor is None else f"{floor:9.1f}{own / floor:7.0%}"
        rivals = []
        for rival, goals in (
            ("vllm", GOALS),
            ("transformers", GOALS_TRANSFORMERS),
            ("llama.cpp", {}),
            ("ramify int8", {}),
        ):
            if rival in row:
                goal = f" (goal {goals[name]}x)" if name in goals else ""
                rivals.append(f"{rival} {row[rival]:.1f}: {own / row[rival]:.2f}x{goal}")
        print(f"{name:<10}{own:9.1f}{bound}   {'; '.join(rivals)}".rstrip())


if __name__ == "__main__":
    main()
