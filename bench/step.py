"""Where the time of one decode step goes on a GPU: matrix products, attention, sampler, the rest, and the host.

    python bench/step.py [--shape 0.6B] [--rows 256] [--length 256] [--without overlap products]

Device times are sums over the kernels of one step, by torch's profiler; the host's time is that of a step without the
device's work. Kernels that overlap also count the time in which they wait for each other, so the parts are right only
`--without overlap`; the time of the whole step is right either way. `--without products` uses cuBLAS for every product.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from gpu import engine  # type: ignore[import-not-found]
from gpu_workloads import SHAPES  # type: ignore[import-not-found]

from ramify import SamplingParams
from ramify.device.step import DeviceStep
from ramify.engine.request import Request
from ramify.gpu import gpu_layers as layers
from ramify.gpu import paged, products

PARTS = {
    "attention": ("_decode", "_prefix", "_merge", "flash"),
    "sampler": ("_score_blocks", "_keep_above", "_draw_tokens", "_find_floors", "_report"),
    "norm, rope, activation": ("_add_rms_norm", "_rope_and_write", "_silu_and_multiply"),
    "products": ("_row_product", "_tiled", "gemm", "gemv", "cutlass", "splitK", "nvjet", "cublas"),
}


class _Nothing:
    """Stands in for a CUDA graph, so that a step takes only the host's time."""

    def replay(self) -> None: ...


def leave_out(names: list[str]) -> None:
    if "overlap" in names:
        for module in (layers, products, paged):
            module.can_overlap = lambda _: False  # type: ignore[attr-defined]
    if "products" in names:
        products.has_one_row = lambda x: False  # noqa: ARG005
        products.has_few_rows = lambda x: False  # noqa: ARG005


def part_of(kernel: str) -> str:
    return next((part for part, names in PARTS.items() if any(name in kernel for name in names)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--without", nargs="+", choices=["overlap", "products"], default=[])
    options = parser.parse_args()
    leave_out(options.without)
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(options.shape, Path(folder))
    for number in range(options.rows):
        prompt = [(number * 7 + position) % 50_000 for position in range(options.length)]
        params = SamplingParams(max_tokens=512, ignore_eos=True, detokenize=False, temperature=0.8)
        llm.core.add_request(Request(str(number), None, prompt, params))
    while llm.core.scheduler.waiting or llm.stats()["generated_tokens"] < 8 * options.rows:
        llm.core.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(options.steps):
        llm.core.step()
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / options.steps
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(options.steps):
            llm.core.step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in seen.key_averages():
        times[part_of(event.key)] += event.self_device_time_total / options.steps / 1e3
        kernels[event.key] += event.self_device_time_total / options.steps / 1e3
    device = llm.core.device
    assert isinstance(device, DeviceStep)
    device.graphs.captured = dict.fromkeys(device.graphs.captured, _Nothing())  # type: ignore[arg-type]
    start = time.perf_counter()
    for _ in range(options.steps):
        llm.core.step()
    host = (time.perf_counter() - start) / options.steps
    print(f"{options.shape}, {options.rows} rows of {options.length}: {whole * 1e3:.2f} ms a step")
    for part, milliseconds in times.most_common():
        print(f"    {part:<26}{milliseconds:8.3f} ms")
    print(f"    {'host, beside the device':<26}{host * 1e3:8.3f} ms")
    for kernel, milliseconds in kernels.most_common(12):
        print(f"        {milliseconds:8.3f} ms  {kernel[:90]}")
    facts = {
        "shape": options.shape,
        "without": options.without,
        "rows": options.rows,
        "step_ms": round(whole * 1e3, 3),
        "host_ms": round(host * 1e3, 3),
    }
    print(json.dumps({**facts, **{part: round(value, 3) for part, value in times.items()}}))


if __name__ == "__main__":
    main()
