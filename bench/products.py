"""Matrix products of a decode step with few rows: cuBLAS beside kernels of our own, over tile sizes.

Regime: 1 to 64 rows in bfloat16, bound by reading each weight once. Each time is that of a CUDA graph over several
weights of one shape (together many times the cache, as in a model), divided by their number; every result is first
compared with float32. Products with few outputs are split along their columns and left in parts, which the decoder's
next kernel adds up; gate and up end in silu(gate) * up, for which cuBLAS needs a second kernel.

    python bench/products.py [--shapes 1.5B 3B] [--rows 1 2 4 8 16 32 64] [--chosen] [--save FILE]

`overlap`: the same kernel, started while the one before it ends. The last line is JSON, with one object per model and
number of rows: ms of all products of a step. --save writes all times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent))

from gpu_workloads import COMMON, SHAPES  # type: ignore[import-not-found]

from ramify.gpu import products
from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.row_product import Norm, RowTiles, row_gate_up, row_product
from ramify.gpu.kernels.tiled_product import Tiles, tiled_gate_up, tiled_product

BYTES = 500_000_000  # of weights in a graph: eight times the cache
REPEATS = 9
DTYPE = torch.bfloat16
TOLERANCE = 1e-2  # of the norm, for rounded factors
Launch = Callable[[Tensor], None]

FEW_ROWS = [
    Tiles(64, 64, 4, 4),
    Tiles(64, 64, 6, 4),
    Tiles(64, 128, 3, 4),
    Tiles(64, 128, 4, 4),
    Tiles(64, 256, 3, 4),
    Tiles(128, 64, 4, 4),
    Tiles(128, 64, 4, 8),
    Tiles(128, 128, 3, 8),
    Tiles(32, 128, 4, 4),
    Tiles(32, 256, 3, 4),
]
SPLITS = (1, 2, 4, 8, 16)
ONE_ROW = [
    RowTiles(2, 256, 1),
    RowTiles(4, 256, 1),
    RowTiles(8, 256, 1),
    RowTiles(2, 512, 1),
    RowTiles(4, 512, 1),
    RowTiles(2, 512, 2),
    RowTiles(4, 512, 2),
    RowTiles(8, 512, 2),
    RowTiles(1, 1024, 4),
    RowTiles(2, 1024, 4),
    RowTiles(4, 1024, 4),
    RowTiles(8, 1024, 4),
    RowTiles(4, 256, 1, 4),
    RowTiles(8, 256, 1, 3),
    RowTiles(4, 1024, 4, 3),
]


@dataclass(frozen=True)
class Product:
    """A weight (outputs, columns), `count` of them in a model."""

    name: str
    outputs: int
    columns: int
    count: int

    @property
    def num_bytes(self) -> int:
        return self.outputs * self.columns * DTYPE.itemsize


@dataclass(frozen=True)
class Time:
    shape: str
    product: str
    rows: int
    how: str
    microseconds: float
    terabytes: float


def products_of(shape: str) -> list[Product]:
    facts = {**COMMON, **SHAPES[shape]}
    hidden, inner, layers = facts["hidden_size"], facts["intermediate_size"], facts["num_hidden_layers"]
    head_dim = facts.get("head_dim", hidden // facts["num_attention_heads"])
    queries, keys = facts["num_attention_heads"] * head_dim, facts["num_key_value_heads"] * head_dim
    return [
        Product("qkv", queries + 2 * keys, hidden, layers),
        Product("output", hidden, queries, layers),
        Product("gate_up", 2 * inner, hidden, layers),
        Product("down", hidden, inner, layers),
        Product("head", facts["vocab_size"], hidden, 1),
    ]


def microseconds(launch: Launch, weights: Sequence[Tensor]) -> float:
    """The time of one weight: the median of a graph over all weights, divided by their number."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            launch(weight)
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(weights))
    return statistics.median(times[1:])


class Case:
    """One product with some rows: its weights and inputs, and the right result for the first weight."""

    def __init__(self, shape: str, product: Product, rows: int) -> None:
        self.shape, self.product, self.rows = shape, product, rows
        copies = max(2, -(-BYTES // product.num_bytes))
        self.weights = [
            torch.randn(product.outputs, product.columns, dtype=DTYPE, device="cuda") / product.columns**0.5
            for _ in range(copies)
        ]
        self.x = torch.randn(rows, product.columns, dtype=DTYPE, device="cuda")
        self.norm = Norm(torch.rand(product.columns, dtype=DTYPE, device="cuda") + 0.5, 1e-6)
        self.times: list[Time] = []

    def plain(self, x: Tensor) -> Tensor:
        whole = torch.mm(x.float(), self.weights[0].float().t())
        if self.product.name == "gate_up":
            gate, up = whole.chunk(2, dim=-1)
            return F.silu(gate) * up
        return whole

    def measure(self, how: str, launch: Launch, result: Callable[[], Tensor], expected: Tensor) -> float:
        """Compares the result, then takes the time; infinite if the kernel does not fit on the chip."""
        try:
            launch(self.weights[0])
        except OutOfResources:
            return float("inf")
        difference = float((result().float() - expected).norm() / expected.norm())
        assert difference < TOLERANCE, f"{self.product}, {self.rows} rows, {how}: off by {difference}"
        time = microseconds(launch, self.weights)
        speed = self.product.num_bytes / time / 1e6
        self.times.append(Time(self.shape, self.product.name, self.rows, how, round(time, 2), round(speed, 2)))
        return time

    def cublas(self) -> float:
        wide = torch.full((self.rows, self.product.outputs), torch.nan, dtype=DTYPE, device="cuda")
        narrow = wide.new_full((self.rows, self.product.outputs // 2), torch.nan)
        logits = [wide]

        def product(weight: Tensor) -> None:
            torch.mm(self.x, weight.t(), out=wide)

        def gate_up(weight: Tensor) -> None:
            product(weight)
            silu_and_multiply(wide, narrow)

        def head(weight: Tensor) -> None:
            logits[0] = torch.mm(self.x, weight.t(), out_dtype=torch.float32)

        launch = {"gate_up": gate_up, "head": head}.get(self.product.name, product)
        result = {"gate_up": lambda: narrow, "head": lambda: logits[0]}.get(self.product.name, lambda: wide)
        return self.measure("cuBLAS", launch, result, self.plain(self.x))

    def few_rows(self, tiles: Tiles, *, overlap: bool) -> float:
        rows, outputs = self.rows, self.product.outputs
        how = f"few rows {tuple(asdict(tiles).values())}{' overlap' if overlap else ''}"
        narrow = torch.full((rows, outputs // 2), torch.nan, dtype=DTYPE, device="cuda")
        parts = torch.full((tiles.splits, rows, outputs), torch.nan, device="cuda")

        def gate_up(weight: Tensor) -> None:
            tiled_gate_up(self.x, weight, narrow, tiles, overlap=overlap)

        def product(weight: Tensor) -> None:
            tiled_product(self.x, weight, parts, tiles, overlap=overlap)

        if self.product.name == "gate_up":
            return self.measure(how, gate_up, lambda: narrow, self.plain(self.x))
        return self.measure(how, product, lambda: parts.sum(0), self.plain(self.x))

    def one_row(self, tiles: RowTiles, *, overlap: bool) -> float:
        """As the decoder asks for it: with the norm before, or the residual after."""
        name = self.product.name
        how = f"one row {tuple(asdict(tiles).values())}{' overlap' if overlap else ''}"
        norm = self.norm if name in ("qkv", "gate_up") else None
        x = self.x.float()
        if norm is not None:
            x = norm.weight.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        outputs = self.product.outputs // 2 if name == "gate_up" else self.product.outputs
        out = torch.zeros(1, outputs, dtype=torch.float32 if name == "head" else DTYPE, device="cuda")
        adds = name in ("output", "down")

        def gate_up(weight: Tensor) -> None:
            row_gate_up(self.x, weight, out, norm=norm, tiles=tiles, overlap=overlap)

        def product(weight: Tensor) -> None:
            row_product(self.x, weight, out, norm=norm, adds=adds, tiles=tiles, overlap=overlap)

        return self.measure(how, gate_up if name == "gate_up" else product, lambda: out, self.plain(x))

    def candidates(self) -> Iterator[Callable[[bool], float]]:
        if self.rows == 1:
            for one in ONE_ROW:
                yield lambda overlap, tiles=one: self.one_row(tiles, overlap=overlap)  # type: ignore[misc]
        name = self.product.name
        for few in FEW_ROWS:
            for splits in SPLITS if name in ("qkv", "output", "down") else (1,):
                programs = -(-self.product.outputs // few.outputs) * splits
                if splits > 1 and (programs > 1100 or self.product.columns // splits < few.columns):
                    continue
                cut = replace(few, splits=splits)
                yield lambda overlap, tiles=cut: self.few_rows(tiles, overlap=overlap)  # type: ignore[misc]

    def as_chosen(self) -> float:
        """What the decoder does now."""
        if self.rows == 1:
            special = {"gate_up": products.ROW_GATE_UP_TILES, "head": products.ROW_HEAD_TILES}
            return self.one_row(special.get(self.product.name, products.ROW_TILES), overlap=True)
        memory = products.shared_memory_of(self.x.device)
        if self.product.name == "gate_up":
            tiles = products.gate_up_tiles_for(self.rows, memory)
        elif self.product.name == "head":
            tiles = products.head_tiles_for(self.rows)
        else:
            tiles = products.tiles_for(self.rows, self.product.outputs, self.product.columns, memory)
        return self.few_rows(tiles, overlap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["1.5B", "3B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--chosen", action="store_true", help="what the decoder does, without the search for better")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    every: list[Time] = []
    totals: dict[str, dict[str, float]] = {}
    print(f"{'':18}{'rows':>5}{'cuBLAS':>20}{'ours, best':>20}   {'as':34}{'chosen now':>20}", flush=True)
    for shape in options.shapes:
        for product in products_of(shape):
            for rows in options.rows:
                case = Case(shape, product, rows)
                vendor = case.cublas()
                # All without overlap first, then the three best of them with it.
                best = [] if options.chosen else list(case.candidates())
                timed = sorted((run(False), index) for index, run in enumerate(best))
                for _, index in timed[:3]:
                    best[index](True)
                chosen = case.as_chosen()
                ours = min((time for time in case.times if time.how != "cuBLAS"), key=lambda time: time.microseconds)
                every += case.times

                def text(time: float, size: int = product.num_bytes) -> str:
                    return f"{time:9.2f} us {size / time / 1e6:5.2f} TB"

                print(
                    f"{shape + ' ' + product.name:18}{rows:5}{text(vendor):>20}{text(ours.microseconds):>20}"
                    f"   {ours.how:34}{text(chosen):>20}",
                    flush=True,
                )
                total = totals.setdefault(f"{shape} rows {rows}", {"cuBLAS": 0.0, "best": 0.0, "chosen": 0.0})
                for name, time in (("cuBLAS", vendor), ("best", ours.microseconds), ("chosen", chosen)):
                    total[name] = round(total[name] + time * product.count / 1e3, 4)
                del case
    if options.save:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        facts = {"machine": torch.cuda.get_device_name(), "commit": commit.stdout.strip(), "totals": totals}
        options.save.write_text(json.dumps({**facts, "times": [asdict(time) for time in every]}))
    for name, total in totals.items():
        print(f"{name:14}" + "".join(f"{how} {value:.3f} ms   " for how, value in total.items()))
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
