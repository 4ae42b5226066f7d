"""Filters alone, on rows of every kind: milliseconds for 512 rows of 128,256 logits, and how many reads that would be.

    python bench/floors.py [--rows 512] [--vocab 128256]

One read is the time of torch's sum over the same logits in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from ramify.gpu.kernels.floors import FloorScratch, find_floors
from ramify.gpu.kernels.race import BlockScores, keep_above, score_blocks

DEVICE = torch.device("cuda")


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


KINDS = ("N(0, 1)", "N(0, 3)", "uniform", "all equal", "one spike", "half ties")


def timed(body: Callable[[], object]) -> float:
    milliseconds: float = triton.testing.do_bench(body, warmup=20, rep=60, return_mode="median")
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=128_256)
    options = parser.parse_args()
    rows, vocab_size = options.rows, options.vocab
    scores = BlockScores.empty(rows, vocab_size, DEVICE)
    scratch, floors = FloorScratch.empty(rows, vocab_size, DEVICE), torch.empty(rows, device=DEVICE)
    ones = torch.ones(rows, device=DEVICE)
    asked = {
        "top_p 0.95": (0, 0.95),
        "top_p 0.5": (0, 0.5),
        "top_k 50, top_p 0.9": (50, 0.9),
        "top_k 20000": (20_000, 1.0),
    }
    found: dict[str, dict[str, float]] = {}
    print(f"{rows} rows of {vocab_size:,} logits, ms for scores, floors and sums of what is left")
    print(f"{'':<14}" + "".join(f"{name:>22}" for name in asked) + f"{'one read':>12}")
    for kind in KINDS:
        logits = rows_of(kind, rows, vocab_size)
        read = timed(partial(logits.sum, -1))
        line = {}
        for name, (k, p) in asked.items():
            top_k = torch.full((rows,), k, dtype=torch.int64, device=DEVICE)
            top_p = ones * p

            def body(logits: Tensor = logits, top_k: Tensor = top_k, top_p: Tensor = top_p) -> None:
                score_blocks(logits, ones, scores)
                find_floors(
                    logits,
                    ones,
                    scores,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=torch.zeros_like(ones),
                    scratch=scratch,
                    floors=floors,
                )
                keep_above(logits, ones, floors, scores)

            line[name] = timed(body)
        print(f"{kind:<14}" + "".join(f"{value:22.3f}" for value in line.values()) + f"{read:12.3f}", flush=True)
        found[kind] = {**line, "one read": read}
    print(json.dumps({"rows": rows, "vocab": vocab_size, "machine": torch.cuda.get_device_name(), "ms": found}))


if __name__ == "__main__":
    main()
