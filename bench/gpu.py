"""Offline generation on one GPU: the H200 workloads, each beside its floor and vLLM's recorded figure.

Random weights of public shapes in bfloat16, random prompts, fixed output lengths, best of two after a warm-up. The
floor is the time of the matrix products and of every key and value that must be read (a shared prefix once), as
measured on the same kind of GPU; vLLM 0.26.0's figures were measured there too.

    python bench/gpu.py [--workloads plain256 …] [--batch-invariant] [--save FILE] [--rehearse]

Workloads of two models are also told in the columns of the document that published them (bench/pair_report.py), and of
every engine what it took of the GPU at its most, beside the share that it was allowed (bench/gpu_peak.py).
--rehearse runs all of it with tiny models, on a CPU too: its figures mean nothing. The last line is JSON; --save
appends one object per result to a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_peak import Peak  # type: ignore[import-not-found]
from gpu_workloads import COMMON, PAIR, REHEARSAL, SHAPES, WORKLOADS, GpuWorkload  # type: ignore[import-not-found]
from pair_report import Measured, measured, table  # type: ignore[import-not-found]
from random_tokenizer import write_tokenizer  # type: ignore[import-not-found]

from ramify import LLM, OptimalSampling, RequestOutput

INVARIANT = "/invariant"  # after the name of a workload that is run with batch_invariant
MEMORY_SHARE = 0.85  # gpu_memory_utilization
LONGEST = {
    "7B": 17_408,
    "llama1B": 4_096,
    "text1B": 4_096,
    "llama8B": 4_096,
}  # contexts that workloads of these models need


def engine(
    model: str,
    folder: Path,
    *,
    rehearse: bool = False,
    warmup: str = "lazy",
    batch_invariant: bool = False,
    max_model_len: int | None = None,
    speculation: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> LLM | OptimalSampling:
    shapes = model.split("+")
    folders = []
    for shape in shapes:
        folders.append(folder / shape)
        folders[-1].mkdir(parents=True, exist_ok=True)
        facts = {**COMMON, **SHAPES[shape], **(REHEARSAL if rehearse else {})}
        (folders[-1] / "config.json").write_text(json.dumps(facts))
        if shape.startswith("text"):
            write_tokenizer(folders[-1])
    options: dict[str, Any] = {
        "load_format": "dummy",
        "warmup": warmup,
        "batch_invariant": batch_invariant,
        "speculation": speculation,
        "say": say,
        "max_num_seqs": 512,
        "max_model_len": 2_048 if rehearse else max_model_len or LONGEST.get(model, 9_216),
        "gpu_memory_utilization": MEMORY_SHARE,
    }
    if rehearse:
        options["num_kv_blocks"] = 4_096
    if len(folders) == 2:
        return OptimalSampling(*map(str, folders), **options)
    return LLM(str(folders[0]), **options)


def run(llm: LLM | OptimalSampling, workload: GpuWorkload) -> tuple[float, list[RequestOutput]]:
    """The seconds it took, and the outputs."""
    llm.reset_prefix_cache()
    prompts, params = workload.requests()
    start = time.perf_counter()
    if isinstance(llm, OptimalSampling):
        options = {**workload.params, "max_tokens": workload.outputs[0], "ignore_eos": True, "detokenize": False}
        outputs = llm.generate(prompts, use_tqdm=False, **options).outputs
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, outputs


def measure(llm: LLM | OptimalSampling, workload: GpuWorkload, repeats: int) -> Measured:
    """The fastest of several runs, after one in which graphs are captured and kernels compiled."""
    first, _ = run(llm, workload)
    llm.core.metrics = replace(llm.core.metrics, blocks_in_use_peak=0)  # of this workload, not of those before it
    best: Measured | None = None
    for _ in range(repeats):
        seconds, outputs = run(llm, workload)
        if best is None or seconds < best.seconds:
            best = measured(llm, workload.outputs, outputs, seconds=seconds, first_seconds=first)
    assert best is not None, "repeats is at least 1"
    return best


def line_of(workload: GpuWorkload, speed: float) -> str:
    line = f"{workload.name:<20}{speed:9,.0f}"
    line += " " * 16 if workload.floor is None else f"{workload.floor:9,.0f}{speed / workload.floor:7.0%}"
    line += " " * 16 if workload.vllm is None else f"{workload.vllm:9,.0f}{speed / workload.vllm:7.2f}"
    if workload.goal is None:
        return line.rstrip()
    return f"{line}{workload.goal:9,.0f}{'' if speed < workload.goal else '  met'}"


def measure_all(
    workloads: Sequence[GpuWorkload],
    results: dict[str, Measured],
    peaks: dict[str, Peak],
    *,
    repeats: int,
    rehearse: bool,
    done: Callable[[Sequence[GpuWorkload]], None],
) -> None:
    """Enters the fastest run of each workload, and what each engine took; `done` is told when an engine is through."""
    with tempfile.TemporaryDirectory() as folder:
        for model, is_invariant in product((*SHAPES, PAIR), (False, True)):
            of_model = [workload for workload in workloads if workload.model == model]
            chosen = [workload for workload in of_model if workload.name.endswith(INVARIANT) == is_invariant]
            if not chosen:
                continue
            start = time.perf_counter()
            llm = engine(model, Path(folder), rehearse=rehearse, batch_invariant=is_invariant)
            print(f"{model}: ready in {time.perf_counter() - start:.1f} s", file=sys.stderr)
            Peak.begin()
            for workload in chosen:
                results[workload.name] = measure(llm, workload, repeats)
                print(line_of(workload, results[workload.name].tokens_per_second), flush=True)
            peak = Peak.since_begin(MEMORY_SHARE)
            if peak is not None:
                peaks[engine_of(chosen[0])] = peak
            del llm
            gc.collect()
            torch.cuda.empty_cache()
            done(chosen)


def engine_of(workload: GpuWorkload) -> str:
    return f"{workload.model}{INVARIANT if workload.name.endswith(INVARIANT) else ''}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="tiny models: only to see that everything runs")
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="each model twice, without and with batch_invariant, and what that costs",
    )
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not torch.cuda.is_available() and not options.rehearse:
        parser.error("there is no GPU here; --rehearse runs tiny models without one, bench/offline.py is for CPUs")
    if options.rehearse and options.save:
        parser.error("a rehearsal's figures are not worth saving")
    workloads = [WORKLOADS[name] for name in dict.fromkeys(options.workloads)]
    if options.rehearse:
        workloads = [workload.rehearsed() for workload in workloads]
    invariant = [replace(each, name=each.name + INVARIANT, twin=each.name, share=0.85) for each in workloads]
    workloads += invariant if options.batch_invariant else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "commit": commit.stdout.strip(),
        "command": f"python bench/gpu.py --repeats {options.repeats}{' --rehearse' if options.rehearse else ''}",
    }
    print(f"{'workload':<20}{'tok/s':>9}{'floor':>9}{'of it':>7}{'vLLM':>9}{'times':>7}{'goal':>9}", flush=True)
    results: dict[str, Measured] = {}
    peaks: dict[str, Peak] = {}

    def done(chosen: Sequence[GpuWorkload]) -> None:
        """Saved at once: whoever stops a long run has what it measured."""
        if options.save is None:
            return
        with options.save.open("a") as file:
            for workload in chosen:
                result, peak = results[workload.name], peaks.get(engine_of(workload))
                line = {
                    "engine": "ramify",
                    "workload": workload.name,
                    "tok_s": round(result.tokens_per_second),
                    **facts,
                }
                line |= result.as_dict() if workload.model == PAIR else {}
                line |= {} if peak is None else {"peak_share": round(peak.share, 4)}
                file.write(json.dumps(line) + "\n")

    measure_all(workloads, results, peaks, repeats=options.repeats, rehearse=options.rehearse, done=done)
    pairs = [workload for workload in workloads if workload.model == PAIR]
    tell(workloads, results, peaks)
    if pairs:
        print(table(pairs, results), flush=True)
    speeds = {name: round(result.tokens_per_second) for name, result in results.items()}
    details = {workload.name: results[workload.name].as_dict() for workload in pairs}
    memory = {name: peak.as_dict() for name, peak in peaks.items()}
    print(json.dumps({"results": speeds, "pairs": details, "memory": memory, **facts}))


def tell(workloads: Sequence[GpuWorkload], results: Mapping[str, Measured], peaks: Mapping[str, Peak]) -> None:
    """What compares: each control with its plain twin, each engine's memory with what it was allowed."""
    for workload in workloads:
        if workload.twin in results:
            ratio = results[workload.name].tokens_per_second / results[workload.twin].tokens_per_second
            print(f"{workload.name}: {ratio:.2f} of {workload.twin} (goal {workload.share})", flush=True)
    for name, peak in peaks.items():
        print(f"{name}: {peak}", flush=True)


if __name__ == "__main__":
    main()
