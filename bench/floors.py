"""Filters alone, on rows of every kind: milliseconds as a captured graph, and how many reads of the logits that is.

    python bench/floors.py [--rows 64 512] [--vocab 49152 128256 151936]

Scores of all blocks, floors, and sums of what is left are timed together; `unfiltered` is the scores alone. One read is
the time of torch's sum over the same logits in the same run. Floors are compared with float64. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ramify.gpu.kernels.floors import Floors
from ramify.gpu.kernels.race import BlockScores, keep_above, score_blocks

DEVICE = torch.device("cuda")
KINDS = ("N(0, 1)", "N(0, 3)", "uniform", "all equal", "one spike", "half ties")


class Asked(NamedTuple):
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ASKED = {
    "top_p 0.95": Asked(top_p=0.95),
    "top_p 0.5": Asked(top_p=0.5),
    "top_k 50": Asked(50),
    "top_k 50, top_p 0.9": Asked(50, 0.9),
    "top_k 20000": Asked(20_000),
    "top_k 20000, top_p 0.9": Asked(20_000, 0.9),
    "min_p 0.05": Asked(min_p=0.05),
}


def rows_of(kind: str, rows: int, vocab_size: int) -> Tensor:
    noise = torch.randn(rows, vocab_size, device=DEVICE)
    if kind == "N(0, 3)":
        return 3 * noise
    if kind == "uniform":
        return torch.rand(rows, vocab_size, device=DEVICE)
    if kind == "all equal":
        return torch.ones(rows, vocab_size, device=DEVICE)
    if kind == "one spike":
        noise[:, vocab_size // 3] = 40.0
    if kind == "half ties":
        noise[:, ::2] = 0.5
    return noise


class Filters:
    """Buffers, and one step over logits (R, V)."""

    def __init__(self, logits: Tensor, asked: Asked) -> None:
        rows, vocab_size = logits.shape
        self.logits, self.asked = logits, asked
        self.ones = torch.ones(rows, device=DEVICE)
        self.top_k = torch.full((rows,), asked.top_k, dtype=torch.int64, device=DEVICE)
        self.top_p, self.min_p = self.ones * asked.top_p, self.ones * asked.min_p
        self.scores = BlockScores.empty(rows, vocab_size, DEVICE)
        self.memory = Floors(rows, vocab_size, DEVICE)
        self.step()

    def score(self) -> None:
        score_blocks(self.logits, self.ones, self.scores)

    def step(self) -> None:
        self.score()
        self.floors = self.memory.find(
            self.logits, self.ones, self.scores, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )
        keep_above(self.logits, self.ones, self.floors, self.scores)

    def check(self, count: int = 8) -> None:
        """The first rows, in float64: what stays is enough, and without the floor's own it is not."""
        for row, floor in zip(self.logits[:count].double(), self.floors[:count].tolist(), strict=True):
            kept = row
            if self.asked.top_k:
                kept = row[row >= row.topk(self.asked.top_k).values[-1]]
            if self.asked.top_p < 1:
                masses = kept.softmax(0)
                assert float(masses[kept >= floor].sum()) >= self.asked.top_p * (1 - 1e-5), self.asked
                assert float(masses[kept > floor].sum()) < self.asked.top_p + 1e-5, self.asked
            elif self.asked.top_k:
                assert floor == float(kept.min()), self.asked


def timed(body: Callable[[], object]) -> float:
    """Median milliseconds of a graph, the cache cleared before each run."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    milliseconds: float = triton.testing.do_bench(graph.replay, warmup=4, rep=16, return_mode="median")
    return milliseconds


def measure(rows: int, vocab_size: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    print(f"{rows} rows of {vocab_size:,} logits")
    print(f"{'':<12}" + "".join(f"{name:>24}" for name in (*ASKED, "unfiltered", "one read")))
    for kind in KINDS:
        logits = rows_of(kind, rows, vocab_size)
        line = {}
        for name, asked in ASKED.items():
            filters = Filters(logits, asked)
            line[name] = timed(filters.step)
            filters.check()
        line["unfiltered"] = timed(Filters(logits, Asked()).score)
        line["one read"] = timed(partial(logits.sum, -1))
        print(f"{kind:<12}" + "".join(f"{value:24.3f}" for value in line.values()), flush=True)
        found[kind] = {name: round(value, 4) for name, value in line.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256, 151_936])
    options = parser.parse_args()
    tables = [
        {"rows": rows, "vocab": vocab_size, "ms": measure(rows, vocab_size)}
        for rows in options.rows
        for vocab_size in options.vocab
    ]
    print(json.dumps({"bench": "floors", "machine": torch.cuda.get_device_name(), "tables": tables}))


if __name__ == "__main__":
    main()
