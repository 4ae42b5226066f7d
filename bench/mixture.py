"""The mixture of two models' logits by itself: torch on a CPU, kernels beside torch in CUDA graphs on a GPU.

    python bench/mixture.py [--rows 32] [--vocab 151936]

Regime: every iteration of the search reads both rows again; on a GPU they stay in the L2 cache, on a CPU four rows at a
time do. The models disagree as real ones do: most rows need three or four iterations. The floor is reading both once
and writing once, at the memory's speed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from ramify.config import AlphaMethod, MixtureConfig
from ramify.sampling import mixture

REPEATS = 9
BANDWIDTH = {"cuda": 4.2e12, "cpu": 2e10}  # bytes a second, of an H200 and of one core


def logits(rows: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(rows, vocab_size, generator=generator) * 3
    theta += torch.rand(rows, vocab_size, generator=generator).pow(200) * 20  # a few likely ones
    teacher = theta + torch.randn(rows, vocab_size, generator=generator) * 1.5
    return teacher.to(device), theta.to(device)


def cpu_milliseconds(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def graph_milliseconds(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) / 10)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=32 if has_gpu else 64)
    parser.add_argument("--vocab", type=int, default=151_936 if has_gpu else 49_152)
    options = parser.parse_args()
    device = torch.device("cuda" if has_gpu else "cpu")
    teacher, theta = logits(options.rows, options.vocab, device)
    first = torch.zeros(options.rows, dtype=torch.bool, device=device)
    special = torch.tensor([0, 1, 2], device=device)
    measure = graph_milliseconds if has_gpu else cpu_milliseconds
    floor = 1e3 * 3 * theta.nbytes / BANDWIDTH[device.type]
    print(f"{options.rows} rows of {options.vocab:,} on {device.type}; floor {floor:.3f} ms")
    results: dict[str, float] = {}

    def show(name: str, work: Callable[[], object]) -> None:
        results[name] = round(measure(work), 4)
        print(f"  {name:24} {results[name]:9.3f} ms")

    for method in get_args(AlphaMethod):
        config = MixtureConfig(alpha_method=method, alpha=0.5 if method == "fixed" else None)

        def torch_mix(config: MixtureConfig = config) -> object:
            return mixture.mix(teacher, theta, config, first=first, special_token_ids=special)

        show(f"{method}, torch", torch_mix)
        if has_gpu:
            from ramify.gpu.mixer import mix

            def kernel_mix(config: MixtureConfig = config) -> object:
                return mix(teacher, theta, config, first=first, special_token_ids=special)

            show(f"{method}, kernels", kernel_mix)
    print(json.dumps({"rows": options.rows, "vocab": options.vocab, "device": device.type, "milliseconds": results}))


if __name__ == "__main__":
    main()
