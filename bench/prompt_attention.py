"""Attention of prompts on a GPU: the paged kernel beside torch's flash kernel on gathered keys and values.

    python bench/prompt_attention.py [--heads 1.5B 7B …] [--tiles]

Random queries over scattered blocks of 16, several shapes of heads and of prompts. The first column is the difference
from float32 attention of the same numbers, relative; the others are ms and TFLOP/s of causal attention alone (gathering
is part of the time of the second). --tiles times other tiles too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ramify.device.reads import Reads, slots_between
from ramify.gpu.kernels.prompt_attention import (
    BLOCK_M,
    BLOCK_N,
    NUM_STAGES,
    NUM_WARPS,
    PROGRAMS_PER_PROCESSOR,
    prompt_attention,
)
from ramify.gpu.kernels.prompt_list import build_prompt_list

HEADS = {"llama1B": (32, 8, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128), "8B": (32, 8, 128)}
# Of each chunk: positions before it, and its rows.
PROMPTS = {
    "1 x 8192": [(0, 8192)],
    "16 x 512": [(0, 512)] * 16,
    "64 x 128": [(0, 128)] * 64,
    "4 x 512 after 4096": [(4096, 512)] * 4,
    "1 x 700": [(0, 700)],
}
CHOSEN = (BLOCK_M[2], BLOCK_N[2], NUM_WARPS[2], NUM_STAGES, PROGRAMS_PER_PROCESSOR)
TILES = [
    (128, 128, 8, 2, 1),
    (128, 64, 8, 2, 1),
    (128, 64, 4, 3, 2),
    (64, 64, 4, 3, 3),
    (64, 64, 4, 2, 4),
    (128, 32, 8, 4, 1),
]


def reads_of(prompts: list[tuple[int, int]]) -> Reads:
    generator = np.random.default_rng(0)
    counts = [-(-(start + rows) // 16) for start, rows in prompts]
    blocks = generator.permutation(sum(counts)).tolist()
    ends = np.cumsum([0, *counts])
    tables = [tuple(blocks[start:end]) for start, end in pairwise(ends.tolist())]
    num_rows = np.array([rows for _, rows in prompts], np.int64)
    starts = np.array([start for start, _ in prompts], np.int64)
    first = np.cumsum(num_rows) - num_rows
    return Reads.of(first, num_rows, starts + 1, tables, (), block_size=16, size=int(num_rows.sum()))


def exact(queries: Tensor, kv: Tensor, reads: Reads) -> Tensor:
    """Float32, a chunk and a key-value head at a time."""
    outputs = []
    for first, rows, end, table in zip(reads.first_rows, reads.num_rows, reads.ends, reads.tables, strict=True):
        last = int(end + rows - 1)
        seen = kv[torch.from_numpy(slots_between(table, 0, last, 16)).cuda()].float()
        keys, values = seen.permute(1, 2, 0, 3)
        q = queries[first : first + rows].transpose(0, 1).float()
        mask = torch.arange(last, device="cuda") <= torch.arange(int(end) - 1, last, device="cuda")[:, None]
        share = q.shape[0] // keys.shape[0]
        heads = [
            F.scaled_dot_product_attention(
                q[None, h : h + 1], keys[None, h // share][:, None], values[None, h // share][:, None], attn_mask=mask
            )[0, 0]
            for h in range(q.shape[0])
        ]
        outputs.append(torch.stack(heads, 1).flatten(1))
    return torch.cat(outputs)


class Case:
    """Some prompts of some heads, with random numbers."""

    def __init__(self, heads: tuple[int, int, int], prompts: list[tuple[int, int]]) -> None:
        self.num_heads, self.kv_heads, self.head_dim = heads
        self.reads = reads = reads_of(prompts)
        slots = 16 * sum(len(table) for table in reads.tables)
        numbers: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.kv = torch.randn(slots, 2, self.kv_heads, self.head_dim, **numbers)
        self.queries = torch.randn(reads.size, self.num_heads, self.head_dim, **numbers)
        self.out = torch.full((reads.size, self.num_heads * self.head_dim), torch.nan, **numbers)
        self.flop = sum(4 * self.num_heads * self.head_dim * rows * (start + (rows + 1) / 2) for start, rows in prompts)
        ends = (reads.ends + reads.num_rows - 1).tolist()
        seen = [slots_between(table, 0, end, 16) for table, end in zip(reads.tables, ends, strict=True)]
        self._seen = torch.from_numpy(np.concatenate(seen)).cuda()
        self._longest = int(reads.num_rows.max()), max(ends)
        self._query_ends, self._key_ends = (
            torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device="cuda")
            for counts in (reads.num_rows.tolist(), ends)
        )
        self._wanted = exact(self.queries, self.kv, reads)

    def gathered(self) -> Tensor:
        seen = self.kv.index_select(0, self._seen)
        ends, options = (self._query_ends, self._key_ends), (0.0, True, False)  # no dropout, causal, no debug mask
        attended: Tensor = torch.ops.aten._flash_attention_forward(
            self.queries, seen[:, 0], seen[:, 1], *ends, *self._longest, *options
        )[0]
        return attended.flatten(1)

    def paged(self, tiles: tuple[int, int, int, int, int]) -> Callable[[], Tensor]:
        block_m, block_n, num_warps, num_stages, programs = tiles
        work = build_prompt_list(self.reads, rows_of_a_tile=block_m // (self.num_heads // self.kv_heads))
        options = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
        num_programs = torch.cuda.get_device_properties(0).multi_processor_count * programs
        sent = torch.from_numpy(work).cuda()

        def run() -> Tensor:
            prompt_attention(self.queries, self.kv, sent, self.out, block_size=16, num_programs=num_programs, **options)
            return self.out

        return run

    def cell(self, run: Callable[[], Tensor]) -> str:
        error = ((run().float() - self._wanted).norm() / self._wanted.norm()).item()
        took = triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median")
        return f"{error:.4f} {took:.3f} {self.flop / took / 1e9:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), help="those of these models")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    for name in options.heads:
        for label, prompts in PROMPTS.items():
            case = Case(HEADS[name], prompts)
            print(f"{name}, {label}: flash {case.cell(case.gathered)}", end="", flush=True)
            for tiles in [CHOSEN, *(TILES if options.tiles else [])]:
                print(f" | {tiles} {case.cell(case.paged(tiles))}", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
