"""Where the time of one decode step goes on a GPU: matrix products, attention, sampler, the rest, and the host.

    python bench/step.py [--shape 0.6B] [--rows 256] [--length 256] [--without overlap products]
    python bench/step.py --shape 1.5B --prompts 8x32@2048 1x256@8192 64x1@512
    python bench/step.py --shape llama1B --prompts 8x8@512 --beams 8x8@512

`--prompts` and `--beams` say how many prompts, how many samples or beams of each, and how long prompts are.
Device times are sums over the kernels of one step, by torch's profiler; the host's time is that of a step without the
device's work. Kernels that overlap also count the time in which they wait for each other, so the parts are right only
`--without overlap`; the time of the whole step is right either way. `--without products` uses cuBLAS for every product.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from gpu import engine  # type: ignore[import-not-found]
from gpu_workloads import SHAPES  # type: ignore[import-not-found]

from ramify import LLM, SamplingParams
from ramify.device.step import DeviceStep
from ramify.engine.request import Request
from ramify.gpu import gpu_layers as layers
from ramify.gpu import packed_weight, paged, products
from ramify.gpu.product_forms import OneForm, Vendor

FLOORS = ("_begin", "propose", "sift", "settle", "_finish")  # of top-k, top-p and min-p
PARTS = {
    "attention": ("_decode", "_prefix", "_merge", "_attend", "_causal", "flash"),
    "sampler": ("_score_blocks", "_keep_above", "_draw_tokens", "_report", "_control", "_count", "_match", *FLOORS),
    "norm, rope, activation": ("_add_rms_norm", "_rope_and_write", "_silu_and_multiply"),
    "products": ("_row_", "_tile", "_copied", "_folded", "gemm", "gemv", "cutlass", "splitK", "nvjet", "cublas"),
}


class _Nothing:
    """Stands in for a CUDA graph, so that a step takes only the host's time."""

    def replay(self) -> None: ...


def leave_out(names: list[str]) -> None:
    if "overlap" in names:
        for module in (layers, products, packed_weight, paged):
            module.can_overlap = lambda _: False  # type: ignore[attr-defined]
    if "products" in names:
        products.dense_weights = lambda role, linears, cache: [  # noqa: ARG005
            products.DenseWeight(linear, OneForm(Vendor())) for linear in linears
        ]
        layers.dense_weights = products.dense_weights  # type: ignore[attr-defined]


def part_of(kernel: str) -> str:
    return next((part for part, names in PARTS.items() if any(name in kernel for name in names)), "other")


@dataclass(frozen=True, slots=True)
class Prompts:
    """So many prompts of so many tokens, and so many samples of each."""

    count: int
    samples: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Prompts:
        count, samples, length = map(int, text.replace("@", "x").split("x"))
        return cls(count, samples, length)

    @property
    def rows(self) -> int:
        return self.count * self.samples

    def __str__(self) -> str:
        return f"{self.count}x{self.samples}@{self.length}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--prompts", nargs="+", type=Prompts.parse, help="such as 8x32@2048; instead of rows and length"
    )
    parser.add_argument("--beams", nargs="+", type=Prompts.parse, default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--functions", type=int, default=0, help="how many of the host's functions to name")
    parser.add_argument("--without", nargs="+", choices=["overlap", "products"], default=[])
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    leave_out(options.without)
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(options.shape, Path(folder), batch_invariant=options.batch_invariant)
    results = []
    plain = options.prompts or ([] if options.beams else [Prompts(options.rows, 1, options.length)])
    for prompts, is_beam_search in [*((each, False) for each in plain), *((each, True) for each in options.beams)]:
        measured = measure(
            llm, prompts, is_beam_search=is_beam_search, steps=options.steps, functions=options.functions
        )
        results.append({"shape": options.shape, "without": options.without, **measured})
    print(json.dumps(results[0] if len(results) == 1 else results))


def measure(llm: LLM, prompts: Prompts, *, is_beam_search: bool, steps: int, functions: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"n": prompts.samples, "temperature": 0.8}
    if is_beam_search:
        asked = {"strategy": "beam_search", "beam_width": prompts.samples}
    params = SamplingParams(max_tokens=512, ignore_eos=True, detokenize=False, **asked)
    llm.reset_prefix_cache()
    for number in range(prompts.count):
        prompt = [(number * 7 + position) % 50_000 for position in range(prompts.length)]
        llm.core.add_request(Request(str(number), None, prompt, params))
    before = llm.stats()["generated_tokens"]
    while llm.core.scheduler.waiting or llm.stats()["generated_tokens"] - before < 8 * prompts.rows:
        llm.core.step()
    torch.cuda.synchronize()
    gc.collect()
    gc.freeze()  # as the loops of every driver do
    start = time.perf_counter()
    for _ in range(steps):
        llm.core.step()
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            llm.core.step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in seen.key_averages():
        times[part_of(event.key)] += event.self_device_time_total / steps / 1e3
        kernels[event.key] += event.self_device_time_total / steps / 1e3
    device = llm.core.device
    assert isinstance(device, DeviceStep)
    captured = device.graphs.captured
    device.graphs.captured = dict.fromkeys(captured, _Nothing())  # type: ignore[arg-type]
    start = time.perf_counter()
    for _ in range(steps):
        llm.core.step()
    host = (time.perf_counter() - start) / steps
    if functions:
        with cProfile.Profile() as seen_on_host:
            for _ in range(steps):
                llm.core.step()
        pstats.Stats(seen_on_host).sort_stats("tottime").print_stats(functions)
    device.graphs.captured = captured
    llm.core.reset()
    gc.unfreeze()
    name = f"{prompts}{' beams' if is_beam_search else ''}"
    print(f"{name}: {whole * 1e3:.2f} ms a step")
    for part, milliseconds in times.most_common():
        print(f"    {part:<26}{milliseconds:8.3f} ms")
    print(f"    {'the device together':<26}{times.total():8.3f} ms")
    print(f"    {'host, beside the device':<26}{host * 1e3:8.3f} ms")
    for kernel, milliseconds in kernels.most_common(12):
        print(f"        {milliseconds:8.3f} ms  {kernel[:90]}")
    facts = {
        "prompts": name,
        "rows": prompts.rows,
        "step_ms": round(whole * 1e3, 3),
        "host_ms": round(host * 1e3, 3),
        "device_ms": round(times.total(), 3),
    }
    return {**facts, **{part: round(value, 3) for part, value in times.items()}}


if __name__ == "__main__":
    main()
