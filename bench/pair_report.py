"""What the fifth source document's benchmark tells of two models: throughput, latency, success rate and memory.

The document published three settings of a 3B teacher and a 1.5B student, on a GPU that it does not name. Its tokens per
second times its latency are 329, 351 and 469 tokens, far from 16 or 32 outputs of 512: its outputs ended early, or its
latency is another thing than the time of a batch. Here every output has its full length.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from ramify import LLM, FinishReason, OptimalSampling, RequestOutput
from ramify.device.step import DeviceStep

GIB = 2**30
# By batch and max tokens: tokens per second, and seconds.
PUBLISHED = {(16, 512): (138.81, 2.37), (32, 512): (152.68, 2.30), (16, 1024): (119.47, 3.93)}


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest run of a workload."""

    tokens_per_second: float
    seconds: float  # of the whole batch
    latency: float  # seconds from a request's arrival to its end, on average
    success: float  # the share of samples that came whole
    memory_gib: float  # weights, and keys and values at their peak
    reserved_gib: float  # what the process took: the pool of keys and values takes its share of the GPU at once
    first_seconds: float  # the first run: graphs are captured, kernels compiled

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def measured(
    llm: LLM | OptimalSampling,
    lengths: tuple[int, int],
    outputs: Sequence[RequestOutput],
    *,
    seconds: float,
    first_seconds: float,
) -> Measured:
    samples = [sample for output in outputs for sample in output.outputs]
    whole = [
        sample.finish_reason is FinishReason.LENGTH
        and lengths[0] <= len(sample.token_ids) <= lengths[1]
        and (sample.mixture is None or all(0 <= report.alpha <= 1 for report in sample.mixture))
        for sample in samples
    ]
    times = [
        output.metrics.finished_time - output.metrics.arrival_time
        for output in outputs
        if output.metrics is not None and output.metrics.finished_time is not None
    ]
    return Measured(
        tokens_per_second=sum(len(sample.token_ids) for sample in samples) / seconds,
        seconds=seconds,
        latency=fmean(times),
        success=fmean(whole),
        memory_gib=_used_bytes(llm) / GIB,
        reserved_gib=_reserved_bytes() / GIB,
        first_seconds=first_seconds,
    )


def table(workloads: Sequence[Any], results: Mapping[str, Measured]) -> str:
    """The document's table, filled with what was measured, beside what it published of the same setting."""
    lines = [
        "",
        "| setting | batch | max tokens | throughput | latency | success | memory | reserved | first run | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for workload in workloads:
        result = results[workload.name]
        published = PUBLISHED.get((workload.num_prompts, workload.outputs[1]))
        cells = (
            workload.name,
            f"{workload.num_prompts}",
            f"{workload.outputs[1]}",
            f"{result.tokens_per_second:,.0f} tok/s",
            f"{result.latency:.2f} s",
            f"{result.success:.0%}",
            f"{result.memory_gib:.2f} GiB",
            f"{result.reserved_gib:.1f} GiB",
            f"{result.first_seconds:.2f} s, {result.first_seconds / result.seconds:.1f} times the best",
            "" if published is None else f"{published[0]} tok/s, {published[1]:.2f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    if {"optimal32", "teacher32"} <= set(results):  # both make equally many tokens
        ratio = results["optimal32"].seconds / results["teacher32"].seconds
        known = "floor 1.61, goal 2.0, then 1.75; published: 20 to 30"
        lines.append(f"\noptimal32 takes {ratio:.2f} times teacher32's time ({known})")
    return "\n".join(lines)


def _used_bytes(llm: LLM | OptimalSampling) -> float:
    """Weights, and the blocks that were held at the peak since the start.

    Blocks are counted over both models together; here both hold equally many, since they see the same prompts.
    """
    device = llm.core.device
    assert isinstance(device, DeviceStep)
    decoders: list[Any] = [lane.layers.decoder for lane in device.lanes]  # type: ignore[attr-defined]
    pools: list[Any] = [lane.layers.pool for lane in device.lanes]
    block: int = sum(pool.kv[:, : pool.block_size].nbytes for pool in pools)
    weights: int = sum(decoder.num_bytes for decoder in decoders)
    return weights + block * llm.core.metrics.blocks_in_use_peak / len(pools)


def _reserved_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
