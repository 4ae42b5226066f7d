"""What the compiler for Hopper makes of sums that must not depend on the batch; runs where there is no GPU.

The same sum occurs in several compiled forms of a kernel (one part or several, with filters in the batch or without),
and which form runs depends on who else is in the step. A sum's order follows from how its numbers lie in threads, so
for each kind the forms must agree on that; products must all be made by the same matrix instruction, and so must those
of attention. Prints one line a kind: its name and how many different ways there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ramify.device.reads import Reads
from ramify.engine.plan import SharedPrefix
from ramify.gpu.exact_prompts import ExactPrompts
from ramify.gpu.invariant_products import InvariantWeight
from ramify.gpu.kernels.controls import ControlTables, control_blocks
from ramify.gpu.kernels.norm import add_rms_norm
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.race import BlockScores, KeyWords, draw_tokens, score_blocks
from ramify.gpu.kernels.rope_write import rope_and_write
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.stretches import PositionCuts
from ramify.gpu.paged import PagedDecode
from ramify.gpu.products import Stream
from ramify.models.linear import Linear
from tests.attention_truth import decode_reads
from tests.kernels.hopper import CPU, Hopper

BF16 = torch.bfloat16
SUMMED = re.compile(r'"tt\.reduce".*?\}\) : \(tensor<([0-9x]+)xf(?:32|64), (#\w+)>', re.DOTALL)


class Compiled:
    """Collects how the kernels compiled meanwhile sum, and by which instruction they multiply."""

    def __init__(self) -> None:
        self.sums: list[frozenset[tuple[str, str]]] = []
        self.instructions: set[str] = set()
        run = JITFunction.run

        def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001
            made = run(kernel, *arguments, warmup=True, **options)
            text: str = made.asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
            self.sums.append(frozenset((shape, layouts[name]) for shape, name in SUMMED.findall(text)))
            self.instructions |= set(re.findall(r"versionMajor = \d+", text))

        driver.set_active(Hopper())
        JITFunction.run = compile_only

    def ways(self, name: str, launch: Callable[[], None]) -> None:
        self.sums, self.instructions = [], set()
        launch()
        assert all(self.sums), "every kernel here sums"
        print(name, len(set(self.sums)))

    def kinds(self, name: str, launch: Callable[[], None]) -> None:
        self.instructions = set()
        launch()
        print(name, len(self.instructions), *sorted(self.instructions))


def norms() -> None:
    for rows in (1, 2, 16):
        x = torch.zeros(rows, 1536, dtype=BF16)
        several = torch.zeros(4, rows, 1536)
        for parts in (Parts.whole(x), Parts(several), Parts(several, x[0])):
            add_rms_norm(x, parts, x[0], 1e-6, x.clone())


def heads() -> None:
    norm = torch.zeros(128, dtype=BF16)
    for rows in (1, 2, 16):
        numbers = torch.zeros(rows, dtype=torch.int64)
        for qkv in (torch.zeros(1, rows, 32 * 128, dtype=BF16), torch.zeros(2, rows, 32 * 128)):
            queries, kv = torch.zeros(rows, 16, 128, dtype=BF16), torch.zeros(64, 2, 8, 128, dtype=BF16)
            rope_and_write(
                Parts(qkv),
                numbers,
                numbers,
                torch.zeros(64),
                1.0,
                queries,
                kv,
                query_norm=norm,
                key_norm=norm,
                eps=1e-6,
            )


def blocks() -> None:
    """Largest and sums of blocks: by the kernel without controls, and by that with them."""
    for rows in (1, 2, 16):
        logits, ones, numbers = torch.zeros(rows, 151_936), torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
        scores, other = (BlockScores.empty(rows, 151_936, CPU) for _ in range(2))
        score_blocks(logits, ones, scores)
        tables = ControlTables.empty(rows, 151_936, CPU)
        control_blocks(
            logits, ones, numbers, numbers, tables, track=0, controlled=logits.clone(), raw_scores=other, scores=scores
        )


def draws() -> None:
    for rows in (1, 2, 16):
        logits, ones, numbers = torch.zeros(rows, 151_936), torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
        scores, words = BlockScores.empty(rows, 151_936, CPU), KeyWords(*(numbers,) * 4)
        for floors in (None, ones):
            draw_tokens(
                logits, ones, words, scores, token_ids=numbers, logprobs=ones, faults=numbers.int(), floors=floors
            )


def products() -> None:
    weight = InvariantWeight(Linear(torch.zeros(2048, 1536, dtype=BF16)))
    for rows in (1, 40, 300, 3000):
        x, norm = torch.zeros(rows, 1536, dtype=BF16), Norm(torch.zeros(1536, dtype=BF16), 1e-6)
        weight.into_stream(x, Stream(x))
        weight.gated_from_stream(Stream(x), norm, torch.zeros(rows, 1024, dtype=BF16))
        weight.logits(x, torch.zeros(rows, 2048))


def attention() -> None:
    """Rows by themselves, rows that share a prefix, and a piece of a prompt, in the tiles that engines take."""
    heads, kv_heads, head_dim, rows, cuts = 14, 2, 128, 4, PositionCuts(2048)
    paged = PagedDecode(
        max_rows=rows,
        max_parts=rows * cuts.most_parts,
        max_blocks=64,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=BF16,
        device=CPU,
        cuts=cuts,
        exact=True,
    )
    kv, queries = torch.zeros(1024, 2, kv_heads, head_dim, dtype=BF16), torch.zeros(20, heads, head_dim, dtype=BF16)
    for shared in ((), (SharedPrefix(32, tuple(range(rows))),)):
        paged.write_list(paged.work_list(decode_reads((700,) * rows, shared, 16)))
        out = torch.zeros(rows, heads * head_dim, dtype=BF16)
        paged.attend(queries[:rows], kv, out, with_prefix=bool(shared))
    one = np.ones(1, np.int64)
    piece = Reads.of(0 * one, len(queries) * one, one, [(0, 1)], [], block_size=16, size=len(queries))
    ExactPrompts(piece, cuts).attend(queries, kv)


if __name__ == "__main__":
    compiled = Compiled()
    compiled.ways("norms", norms)
    compiled.ways("heads", heads)
    compiled.ways("blocks", blocks)
    compiled.ways("draws", draws)
    compiled.kinds("products", products)
    compiled.kinds("attention", attention)
