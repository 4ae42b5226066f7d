"""A row's attention has the same bits alone, beside others, with a shared beginning, and as a row of any piece of a
prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.device.reads import Reads
from ramify.engine.plan import SharedPrefix
from ramify.gpu import paged
from ramify.gpu.kernels.causal_attention import causal_attention, rows_of_a_tile
from ramify.gpu.kernels.prompt_list import build_prompt_list
from ramify.gpu.kernels.stretches import PositionCuts
from ramify.gpu.paged import PagedDecode
from tests.attention_truth import decode_reads
from tests.kernels.scene import TOLERANCE

# On a GPU with the tiles that engines use; in the interpreter all is small.
ON_GPU = torch.cuda.is_available()
CUTS = PositionCuts(2_048) if ON_GPU else PositionCuts(64, ((16, 32), (32, 2**20)))
LENGTH = 1_000 if ON_GPU else 60
BLOCK_N = None if ON_GPU else 16
HEADS = [(6, 2, 16)] if not ON_GPU else [(16, 8, 128), (12, 2, 128), (32, 8, 64), (7, 1, 64)]
BLOCK_SIZE = 16


class Track:
    """One sequence: keys and values of LENGTH positions in scattered blocks, and a query for each position."""

    def __init__(self, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.kv_heads, self.head_dim = heads
        generator = torch.Generator().manual_seed(0)
        num_blocks = -(-LENGTH // BLOCK_SIZE)
        self.table = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
        kv = torch.full(((num_blocks + 1) * BLOCK_SIZE, 2, self.kv_heads, self.head_dim), torch.nan)
        positions = torch.arange(LENGTH)
        slots = torch.tensor(self.table)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        kv[slots] = torch.randn(LENGTH, 2, self.kv_heads, self.head_dim, generator=generator)
        queries = 2 * torch.randn(LENGTH, self.heads, self.head_dim, generator=generator)
        self.kv, self.queries, self.device = kv.to(device, dtype), queries.to(device, dtype), device

    def decoded(self, positions: list[int], shared: list[SharedPrefix] | None = None) -> Tensor:
        """Single rows, one after another in this order."""
        buffers = PagedDecode(
            max_rows=len(positions),
            max_parts=len(positions) * CUTS.most_parts,
            max_blocks=len(self.table),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=BLOCK_SIZE,
            dtype=self.kv.dtype,
            device=self.device,
            cuts=CUTS,
            exact=True,
            decode_options={} if ON_GPU else {"num_programs": 3, "block_n": 16},
            prefix_options={} if ON_GPU else {"num_programs": 2, "block_m": 16, "block_n": 16},
        )
        buffers.tables[:] = torch.tensor(self.table, dtype=torch.int32)
        lengths = [position + 1 for position in positions]
        work = buffers.work_list(decode_reads(lengths, shared or (), BLOCK_SIZE))
        self.num_whole = int((work.own[:, 3] < 0).sum())
        buffers.write_list(work)
        queries = self.queries[positions]
        out = torch.full((len(queries), self.heads * self.head_dim), torch.nan).to(queries)
        buffers.attend(queries, self.kv, out, with_prefix=bool(shared))
        return out

    def as_prompt(self, begins: list[int]) -> Tensor:
        """All positions, in pieces that begin at these, computed in one step as pieces of different sequences."""
        counts = np.diff([*begins, LENGTH])
        reads = Reads.of(
            np.array(begins),
            counts,
            np.array(begins) + 1,
            [tuple(self.table)] * len(begins),
            [],
            block_size=BLOCK_SIZE,
            size=LENGTH,
        )
        rows = rows_of_a_tile(self.heads // self.kv_heads, self.kv.element_size())
        work = torch.from_numpy(build_prompt_list(reads, rows_of_a_tile=rows)).to(self.device)
        cuts = torch.from_numpy(CUTS.positions).to(self.device, torch.int32)
        out = torch.full((LENGTH, self.heads * self.head_dim), torch.nan).to(self.queries)
        causal_attention(self.queries, self.kv, work, cuts, out, block_size=BLOCK_SIZE, num_programs=3, block_n=BLOCK_N)
        return out

    def truth(self) -> Tensor:
        slots = torch.tensor(self.table)[torch.arange(LENGTH) // BLOCK_SIZE] * BLOCK_SIZE
        slots += torch.arange(LENGTH) % BLOCK_SIZE
        keys, values = self.kv.cpu()[slots].double().repeat_interleave(self.heads // self.kv_heads, 2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", self.queries.cpu().double(), keys) * self.head_dim**-0.5
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@pytest.fixture(params=[0, 10_000], ids=["whole rows", "parts"])
def walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """At a time: where they are few, an item is all that a row reads by itself, where many, one part."""
    monkeypatch.setattr(paged, "WALKS_PER_PROCESSOR", request.param)
    return int(request.param)


# float32 goes the same ways; the interpreter is slow.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32] if ON_GPU else [torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_rows_attention(heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, walks: int) -> None:
    track = Track(heads, dtype, device)
    prompt = track.as_prompt([0])
    torch.testing.assert_close(prompt.cpu().double(), track.truth(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(track.as_prompt([0, 16, 19, 37]), prompt), "in pieces"
    first, second = int(CUTS.positions[1]), int(CUTS.positions[2])
    positions = [LENGTH - 1, 0, 5, first - 1, first, second - 1, second, second + 3, LENGTH - 2]
    assert torch.equal(track.decoded(positions), prompt[positions]), "decodes together"
    assert track.num_whole == (3 if walks else len(positions)), "rows of one part, or all"
    assert torch.equal(track.decoded([second])[0], prompt[second]), "a decode alone"
    blocks = CUTS.largest_prefix(second // BLOCK_SIZE, BLOCK_SIZE)
    shared = [SharedPrefix(blocks, (0, 6, 7, 8))]
    assert torch.equal(track.decoded(positions, shared), prompt[positions]), "some with a shared beginning"
