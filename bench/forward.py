"""One forward pass of decodes on a GPU, in a graph as an engine replays it: its time, and when its kernels run.

    python bench/forward.py [--shape llama8B] [--form gptq4] [--rows 1 64] [--length 500] [--layers N]
                            [--without overlap] [--timeline] [--paces]

Random weights of a public shape in bfloat16; every row has so many positions of its own. Head included, sampler and
host left out. `--timeline` shows the kernels of a middle layer as the profiler saw them: where a kernel begins before
the one above it ends, they overlap. `--paces` times the whole pass at every pace (gpu/paces.py), those that engines
do not try yet too, and tells the one that a few layers chose. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from few_bits import FORMS  # type: ignore[import-not-found]
from gpu_workloads import COMMON, SHAPES  # type: ignore[import-not-found]
from step import leave_out  # type: ignore[import-not-found]

from ramify.device.layers import Batch
from ramify.device.pool import KVPool
from ramify.device.reads import Reads
from ramify.gpu.form_cache import FormCache, machine_of
from ramify.gpu.gpu_layers import GpuLayers
from ramify.gpu.packed_parts import DevicePacking
from ramify.gpu.product_forms import ALWAYS, NEVER, Pace
from ramify.models.decoder import Decoder
from ramify.models.families import architecture_from_config
from ramify.models.weights import fill_randomly

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Given:
    """In place of a MeasuredPace."""

    pace: Pace

    def of(self, *_: Any, **__: Any) -> Pace:
        return self.pace


def told_of(pace: Pace) -> str:
    stays = {ALWAYS: "all stay", NEVER: "all pass"}.get(pace.stays_from, f"those of {pace.stays_from} MiB stay")
    ahead = f", {pace.asks_ahead} MiB ahead" if pace.asks_ahead else ""
    return f"{stays}{', overlap' if pace.overlaps else ''}{', early' if pace.reads_early else ''}{ahead}"


class Forward:
    """A model of random weights, and rows of one length each."""

    def __init__(
        self, shape: str, *, max_rows: int, length: int, layers: int | None = None, form: str = "bf16"
    ) -> None:
        facts = {**COMMON, **SHAPES[shape], **FORMS[form]}
        arch = architecture_from_config({**facts, "num_hidden_layers": layers or facts["num_hidden_layers"]})
        self.decoder = Decoder(arch, DTYPE, DEVICE, DevicePacking(DEVICE, DTYPE) if FORMS[form] else None)
        fill_randomly(self.decoder, 0, DTYPE)
        self.length, self._blocks = length, -(-length // BLOCK_SIZE)
        pool = KVPool(arch, max_rows * self._blocks, BLOCK_SIZE, DTYPE, DEVICE)
        pool.kv.normal_()
        self.layers = GpuLayers(
            self.decoder,
            pool,
            max_rows=max_rows,
            max_model_len=2 * length,
            forms=FormCache(machine_of(DEVICE), None),
            unproven_paces=True,
        )
        self._logits = torch.empty(max_rows, arch.vocab_size, device=DEVICE)
        self._hidden: torch.Tensor | None = None
        self._batch: Batch | None = None

    def capture(self, rows: int, pace: Pace | None = None) -> torch.cuda.CUDAGraph:
        """At the pace that is measured, unless one is given."""
        numbers = np.arange(rows)
        tables = [tuple(range(row * self._blocks, (row + 1) * self._blocks)) for row in range(rows)]
        ends = np.full(rows, self.length)
        self.layers.prepare(
            Reads.of(numbers, np.ones_like(numbers), ends, tables, [], block_size=BLOCK_SIZE, size=rows)
        )
        last = torch.full((rows,), self.length - 1, device=DEVICE)
        slots = torch.arange(rows, device=DEVICE) * self._blocks * BLOCK_SIZE + last
        batch = self._batch = Batch(torch.arange(rows, device=DEVICE), last, slots)  # a graph reads it where it is

        def step() -> None:
            self._hidden = self.layers.forward(batch)
            self.layers.logits(self._hidden, self._logits[:rows])

        given = nullcontext() if pace is None else patch.object(self.layers, "_paces", Given(pace))
        with given:
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        return graph

    def paces(self, rows: int) -> dict[str, float]:
        """Milliseconds at each."""
        measured = self.layers._paces
        assert measured is not None, "a GPU on which kernels overlap"
        shape = measured.shape()
        found = {pace: milliseconds(self.capture(rows, pace)) for pace in shape.paces(rows)}
        for pace in shape.asking(min(found, key=found.__getitem__), rows):
            found[pace] = milliseconds(self.capture(rows, pace))
        times = {told_of(pace): round(time, 4) for pace, time in found.items()}
        times["taken"] = round(milliseconds(self.capture(rows)), 4)
        print("   ", "; ".join(f"{name} {time:.3f}" for name, time in times.items()))
        print("    taken:", told_of(measured.of(rows, lambda *_: None)), flush=True)
        return times

    def seen(self, rows: int) -> torch.Tensor:
        """The logits of the last replay (rows, vocabulary)."""
        return self._logits[:rows]


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int = REPLAYS) -> float:
    times = []
    for _ in range(3 + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times[3:])


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float]]:
    """Name, begin and end of every kernel of a replay, in us, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    spans = spans[2 * len(spans) // 3 :]
    return [(name, begin - spans[0][0], end - spans[0][0]) for begin, end, name in spans]


def show(kernels: list[tuple[str, float, float]], layers: int) -> None:
    """A layer and a half from the middle, then the last kernels."""
    each = len(kernels) // layers
    middle = each * (layers // 2)
    for chosen in (kernels[middle : middle + each * 3 // 2], kernels[-4:]):
        before = chosen[0][1]
        for name, begin, end in chosen:
            after = f"{end - before:8.2f} after the last"
            print(f"    {begin - chosen[0][1]:9.2f} +{end - begin:8.2f} us, {after}  {name[:60]}")
            before = end
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama8B")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--form", choices=list(FORMS), default="bf16", help="of the weights of the layers")
    parser.add_argument("--without", nargs="+", choices=["overlap"], default=[])
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--paces", action="store_true")
    options = parser.parse_args()
    leave_out(options.without)
    told: dict[str, Any] = {
        "shape": options.shape,
        "length": options.length,
        "without": options.without,
        "form": options.form,
    }
    with torch.inference_mode():
        forward = Forward(
            options.shape,
            max_rows=max(options.rows),
            length=options.length,
            layers=options.layers,
            form=options.form,
        )
        for rows in options.rows:
            graph = forward.capture(rows)
            told[f"{rows} rows"] = round(milliseconds(graph), 4)
            print(f"{options.shape}, {rows} rows: {told[f'{rows} rows']:.3f} ms", flush=True)
            if options.paces:
                told[f"{rows} rows, paces"] = forward.paces(rows)
            if options.timeline:
                show(kernels_of(graph), forward.decoder.arch.num_layers)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
