"""The decode attention kernels on a GPU, one layer at a time, beside SDPA and beside the memory's speed.

Regime: 1 to 512 rows in bfloat16, one query each. A row's own positions are bound by reading keys and values once; a
prefix that 256 rows share is bound by arithmetic, because all of them see every key. Each time is that of a CUDA graph
over several layers, divided by their number. Each layer has its own keys and values: those of a single one would stay
in the cache, as they never do in a model.

    python bench/kernels.py [--shape NAME] [--sweep] [--top 5]

SDPA has the easier task: contiguous keys and values, and all rows of the same, mean length. `--sweep` tries other tile
sizes, warps, stages, programs and splits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ramify.device.reads import Reads
from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels import hopper_prefix
from ramify.gpu.kernels.early_decode import MOST_PAIRS
from ramify.gpu.kernels.stretches import PREFIX_SPLIT, EvenCuts
from ramify.gpu.paged import PagedDecode
from ramify.gpu.prefix_ways import DIVIDED, DIVIDED_BESIDE, SCHEDULED, SCHEDULED_BESIDE

BANDWIDTH = 4.2e12  # bytes a second that a copy reaches on an H200
FEWEST_LAYERS, MOST_LAYERS, REPEATS, BLOCK_SIZE = 6, 36, 15, 16
BYTES = 200_000_000  # of keys and values: more than the cache keeps
DTYPE = torch.bfloat16
Options = Mapping[str, int]
WAYS = {  # for Hopper
    "scheduled": SCHEDULED,
    "scheduled, own parts beside": SCHEDULED_BESIDE,
    "divided": DIVIDED,
    "divided, own parts beside": DIVIDED_BESIDE,
}


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    prefix: int
    own: tuple[int, int]  # shortest and longest
    head_dim: int = 128
    rows: int = 256
    prefixes: int = 1

    @property
    def bytes_per_position(self) -> int:
        return 2 * self.kv_heads * self.head_dim * DTYPE.itemsize


SHAPES = (
    Shape("teacher1 (Qwen2.5-3B)", 16, 2, 0, (384, 384), rows=1),
    Shape("teacher32 (Qwen2.5-3B)", 16, 2, 0, (128, 640), rows=32),
    Shape("student32 (Qwen2.5-1.5B)", 12, 2, 0, (128, 640), rows=32),
    Shape("plain256 (Qwen3-0.6B)", 16, 8, 0, (128, 384)),
    Shape("fan1x256@8k (Qwen2.5-1.5B)", 12, 2, 8192, (128, 128)),
    Shape("fan8x32@2k (Qwen2.5-1.5B)", 12, 2, 2048, (128, 128), prefixes=8),
    Shape("fan64x8@512 (Qwen2.5-1.5B)", 12, 2, 512, (128, 128), rows=512, prefixes=64),
    Shape("fan1x256@16k (Qwen2.5-7B)", 28, 4, 16384, (64, 64)),
    Shape("votes4x64 (Llama 8B)", 32, 8, 2000, (128, 128), prefixes=4),
    Shape("roll32x16 (Llama 1B)", 32, 8, 240, (256, 256), head_dim=64, rows=512, prefixes=32),
)


class Layers:
    """A few layers' pools with scattered blocks, and the rows' lengths and tables."""

    def __init__(self, shape: Shape) -> None:
        numbers = np.random.default_rng(0)
        self.shape = shape
        low, high = shape.own
        self.own = numbers.integers(low, high + 1, shape.rows)
        prefix_blocks = shape.prefix // BLOCK_SIZE
        own_blocks = -(-high // BLOCK_SIZE)
        in_prefixes = shape.prefixes * prefix_blocks
        blocks = numbers.permutation(in_prefixes + shape.rows * own_blocks).astype(np.int32)
        prefixes = blocks[:in_prefixes].reshape(shape.prefixes, prefix_blocks)
        shared = np.repeat(prefixes, shape.rows // shape.prefixes, axis=0)
        self.tables = np.concatenate((shared, blocks[in_prefixes:].reshape(shape.rows, own_blocks)), axis=1)
        size = len(blocks) * BLOCK_SIZE * shape.bytes_per_position
        count = min(max(FEWEST_LAYERS, -(-BYTES // size)), MOST_LAYERS)
        self.kv = torch.empty(
            count, len(blocks) * BLOCK_SIZE, 2, shape.kv_heads, shape.head_dim, dtype=DTYPE, device="cuda"
        ).normal_()
        self.queries = torch.randn(shape.rows, shape.heads, shape.head_dim, dtype=DTYPE, device="cuda")
        self.out = torch.empty(shape.rows, shape.heads * shape.head_dim, dtype=DTYPE, device="cuda")

    def paged(
        self,
        own_split: int | None = None,
        prefix_split: int | None = None,
        decode_options: Options | None = None,
        prefix_options: Options | None = None,
        **options: Any,
    ) -> PagedDecode:
        """Cut as the engine cuts, unless splits are given; the options are PagedDecode's."""
        shape = self.shape
        own_split = own_split or EvenCuts.of(shape.rows, shape.kv_heads).own_split
        parts = EvenCuts.most_parts(shape.prefix + shape.own[1])
        if prefix_split is not None:
            parts = -(-shape.prefix // prefix_split) - (-shape.own[1] // own_split)
        paged = PagedDecode(
            max_rows=shape.rows,
            max_parts=shape.rows * parts,
            max_blocks=self.tables.shape[1],
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK_SIZE,
            dtype=DTYPE,
            device=self.kv.device,
            cuts=None if prefix_split is None else EvenCuts(own_split, prefix_split),
            decode_options=decode_options,
            prefix_options=prefix_options,
            **options,
        )
        paged.tables.copy_(torch.from_numpy(self.tables))
        sharers = np.arange(shape.rows).reshape(shape.prefixes, -1).tolist()
        prefixes = [SharedPrefix(shape.prefix // BLOCK_SIZE, tuple(rows)) for rows in sharers]
        ends = shape.prefix + self.own
        reads = Reads.of(
            np.arange(shape.rows),
            np.ones_like(ends),
            ends,
            [()] * shape.rows,
            prefixes if shape.prefix else [],
            block_size=BLOCK_SIZE,
            size=shape.rows,
        )
        paged.write_list(paged.work_list(reads))
        return paged


def microseconds(launch: Callable[[Tensor], None], layers: Tensor) -> float:
    """The time of one layer: the median of a graph over all layers, divided by their number."""
    launch(layers[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            launch(layer)
    graph.replay()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(layers))
    return statistics.median(times)


def sdpa_microseconds(shape: Shape, queries_per_kv_head: int, batch: int, length: int) -> float:
    """Dense attention over contiguous keys and values: of rows apart, or of all heads that read the same keys."""
    heads = shape.heads if queries_per_kv_head == 1 else shape.kv_heads
    q = torch.randn(batch, heads, queries_per_kv_head, shape.head_dim, dtype=DTYPE, device="cuda")
    kv = torch.randn(FEWEST_LAYERS, 2, batch, shape.kv_heads, length, shape.head_dim, dtype=DTYPE, device="cuda")

    def launch(layer: Tensor) -> None:
        F.scaled_dot_product_attention(q, layer[0], layer[1], enable_gqa=queries_per_kv_head == 1)

    return microseconds(launch, kv)


def report(layers: Layers) -> dict[str, float]:
    shape = layers.shape
    paged = layers.paged()
    heads_per_kv_head = shape.heads // shape.kv_heads
    own_bytes = int(layers.own.sum()) * shape.bytes_per_position
    result = {}

    def show(name: str, time: float, note: str = "") -> None:
        result[name] = round(time, 2)
        print(f"  {name:24} {time:9.2f} us a layer   {note}")

    def speed(size: int, time: float) -> str:
        reached = size / (time * 1e-6)
        return f"{size / 1e6:7.1f} MB, {reached / 1e12:5.2f} TB/s ({100 * reached / BANDWIDTH:.0f} % of 4.2)"

    print(f"{shape.name}: {shape.heads}/{shape.kv_heads} heads, prefix {shape.prefix}, own {shape.own}")
    time = microseconds(lambda layer: paged.attend_own(layers.queries, layer), layers.kv)
    show("decode", time, speed(own_bytes, time))
    mean = round(float(layers.own.mean()))
    time = sdpa_microseconds(shape, 1, shape.rows, mean)
    show("SDPA, own", time, speed(shape.rows * mean * shape.bytes_per_position, time))
    if shape.prefix:
        flops = 4 * shape.rows * shape.heads * shape.prefix * shape.head_dim
        time = microseconds(lambda layer: paged.attend_shared(layers.queries, layer), layers.kv)
        size = shape.prefixes * shape.prefix * shape.bytes_per_position
        show("prefix", time, f"{speed(size, time)}, {flops / time / 1e6:.0f} TFLOP/s")
        queries = shape.rows // shape.prefixes * heads_per_kv_head
        time = sdpa_microseconds(shape, queries, shape.prefixes, shape.prefix)
        show("SDPA, prefix", time, f"{flops / time / 1e6:.0f} TFLOP/s")
    with_prefix = bool(shape.prefix)
    time = attention_time(layers, paged)
    show("all", time, speed(own_bytes + shape.prefixes * shape.prefix * shape.bytes_per_position, time))
    if with_prefix and hopper_prefix.can_schedule(layers.kv.device, DTYPE, shape.head_dim):
        for name, way in WAYS.items():
            show(f"all, {name}", attention_time(layers, layers.paged(way=way)))
    if not with_prefix and shape.rows * shape.kv_heads <= MOST_PAIRS:
        show("all, read early", attention_time(layers, paged, reads_early=True))
    if not with_prefix:
        for own_split, block_n in product((64, 128, 256, 512), (32, 64, 128)):
            if block_n <= own_split:
                time = decode_time(layers, own_split, block_n=block_n)
                show(f"all, cut at {own_split} by {block_n}", time, speed(own_bytes, time))
    return result


def attention_time(layers: Layers, paged: PagedDecode, *, reads_early: bool = False) -> float:
    options = {"with_prefix": bool(layers.shape.prefix), "reads_early": reads_early}
    return microseconds(lambda layer: paged.attend(layers.queries, layer, layers.out, **options), layers.kv)


def decode_time(layers: Layers, own_split: int, **options: int) -> float:
    paged = layers.paged(own_split=own_split, prefix_split=PREFIX_SPLIT, decode_options=options)
    with_prefix = bool(layers.shape.prefix)
    return microseconds(
        lambda layer: paged.attend_own(layers.queries, layer, layers.out, with_prefix=with_prefix), layers.kv
    )


def whole_time(layers: Layers, prefix_split: int, **options: int) -> float:
    """With the decode kernel, because shorter stretches spread the prefix better but give it more to merge."""
    return attention_time(layers, layers.paged(prefix_split=prefix_split, prefix_options=options))


def sweep(
    name: str, measure: Callable[..., float], layers: Layers, grid: Mapping[str, tuple[int, ...]], top: int
) -> None:
    """Tries every combination of the grid's values and prints the best; num_programs is per multiprocessor."""
    processors = torch.cuda.get_device_properties(layers.kv.device).multi_processor_count
    times: list[tuple[float, dict[str, int]]] = []
    for values in product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        scaled = {key: value * processors if key == "num_programs" else value for key, value in setting.items()}
        try:
            times.append((measure(layers, **scaled), setting))
        except OutOfResources:
            continue
    for time, setting in sorted(times, key=lambda pair: pair[0])[:top]:
        print(f"  {name:16} {time:9.2f} us   " + ", ".join(f"{key} {value}" for key, value in setting.items()))


DECODE_GRID = {
    "block_n": (32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 5),  # 4 gives the same code as 3: the block table's load takes stages too
    "num_programs": (4, 8, 16),
    "own_split": (256, 512),
}
PREFIX_GRID = {
    "block_n": (64, 128),
    "num_programs": (1, 2, 4),
    "prefix_split": (256, 512, 768, 1024, 1664, 2048, 2432, 4096),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--top", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these kernels are timed on a GPU; there is none here")
    results = {}
    for shape in SHAPES:
        if options.shape not in shape.name:
            continue
        layers = Layers(shape)
        results[shape.name] = report(layers)
        if options.sweep:
            sweep("decode", decode_time, layers, DECODE_GRID, options.top)
            if shape.prefix:
                sweep("all, by prefix", whole_time, layers, PREFIX_GRID, options.top)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"machine": torch.cuda.get_device_name(), "commit": commit.stdout.strip()}
    print(json.dumps({"engine": "ramify", "workload": "kernels", "us_per_layer": results, **facts}))


if __name__ == "__main__":
    main()
