"""Pieces of prompts over scattered blocks against float64 attention, row by row; NaN wherever nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.device.reads import Reads
from ramify.gpu.kernels.prompt_attention import prompt_attention
from ramify.gpu.kernels.prompt_list import HEADER, TILE_FIELDS, build_prompt_list, longest_list
from tests.kernels.scene import TOLERANCE, Scene, make_scene

# start and number of rows of each chunk: from nothing, after a past, in the middle of a block, a decode between them
CHUNKS = ((0, 37), (50, 20), (16, 2), (90, 1), (0, 64), (31, 33))
FIRST_ROW = 3  # rows before these belong to others
HEADS = {"2 of 1": (4, 2), "7 of 1": (7, 1), "1 of 1": (2, 2)}


def scene_of(
    chunks: Sequence[tuple[int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Scene, Reads]:
    """The scene has a row for each chunk; what it holds of queries nobody reads."""
    scene = make_scene(
        [start + count for start, count in chunks],
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        device=device,
    )
    num_rows = np.array([count for _, count in chunks], np.int64)
    counts = [-(-length // 16) for length in scene.lengths]
    tables = [tuple(table[:count]) for table, count in zip(scene.tables.tolist(), counts, strict=True)]
    reads = Reads.of(
        FIRST_ROW + np.cumsum(num_rows) - num_rows,
        num_rows,
        np.array([start + 1 for start, _ in chunks], np.int64),
        tables,
        (),
        block_size=16,
        size=FIRST_ROW + int(num_rows.sum()),
    )
    return scene, reads


def expected(scene: Scene, reads: Reads, queries: Tensor) -> dict[int, Tensor]:
    """By row, (heads * head_dim) in float64."""
    rows = {}
    for chunk, (first, count, end) in enumerate(zip(reads.first_rows, reads.num_rows, reads.ends, strict=True)):
        table = scene.tables[chunk].cpu().long()
        positions = torch.arange(int(end) - 1 + int(count))
        seen = scene.kv.cpu()[table[positions // 16] * 16 + positions % 16].double()
        keys, values = seen.repeat_interleave(scene.queries_per_row, dim=2).permute(1, 2, 0, 3)
        for row in range(int(count)) if count > 1 else ():
            query, sees = queries[int(first) + row].cpu().double(), int(end) + row
            scores = torch.einsum("hd,hpd->hp", query, keys[:, :sees]) * query.shape[-1] ** -0.5
            rows[int(first) + row] = torch.einsum("hp,hpd->hd", scores.softmax(-1), values[:, :sees]).flatten()
    return rows


def attend(scene: Scene, reads: Reads, queries: Tensor, *, block_m: int, block_n: int, num_programs: int = 3) -> Tensor:
    work = build_prompt_list(reads, rows_of_a_tile=block_m // scene.queries_per_row)
    out = queries.new_full((len(queries), queries[0].numel()), 7.0)
    prompt_attention(
        queries,
        scene.kv,
        torch.from_numpy(work).to(queries.device),
        out,
        block_size=16,
        num_programs=num_programs,
        block_m=block_m,
        block_n=block_n,
    )
    return out


@pytest.mark.parametrize("heads", list(HEADS))
@pytest.mark.parametrize(("head_dim", "block_m", "block_n"), [(32, 16, 32), (64, 64, 16)])
def test_every_row_sees_its_past_and_itself(
    heads: str, head_dim: int, block_m: int, block_n: int, dtype: torch.dtype, device: torch.device
) -> None:
    scene, reads = scene_of(CHUNKS, HEADS[heads], head_dim, dtype, device)
    queries = 2 * torch.randn(reads.size, HEADS[heads][0], head_dim, device=device).to(dtype)
    out = attend(scene, reads, queries, block_m=block_m, block_n=block_n)
    wanted = expected(scene, reads, queries)
    for row, values in enumerate(out.cpu().double()):
        if row in wanted:
            torch.testing.assert_close(values, wanted[row], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        else:
            assert (values == 7.0).all(), "rows of others stay as they are"


def test_a_row_is_the_same_however_its_prompt_is_cut(dtype: torch.dtype, device: torch.device) -> None:
    """And whatever else is in the step."""
    scene, whole = scene_of(((0, 70), (0, 9)), (4, 2), 32, dtype, device)
    queries = torch.randn(whole.size, 4, 32, device=device).to(dtype)
    out = attend(scene, whole, queries, block_m=16, block_n=32)
    for first, last in ((0, 11), (11, 64), (64, 70)):
        piece = Reads.of(
            np.array([0]), np.array([last - first]), np.array([first + 1]), whole.tables[:1], (), block_size=16,
            size=last - first,
        )  # fmt: skip
        rows = slice(FIRST_ROW + first, FIRST_ROW + last)
        assert torch.equal(attend(scene, piece, queries[rows], block_m=16, block_n=32), out[rows])


def test_a_step_without_prompts_computes_nothing(device: torch.device) -> None:
    scene, reads = scene_of(((4, 1), (9, 1)), (4, 2), 32, torch.float32, device)
    queries = torch.randn(reads.size, 4, 32, device=device)
    assert (attend(scene, reads, queries, block_m=16, block_n=32) == 7.0).all()


def test_the_longest_walks_come_first_and_lists_have_their_room() -> None:
    _, reads = scene_of(CHUNKS, (4, 2), 32, torch.float32, torch.device("cpu"))
    work = build_prompt_list(reads, rows_of_a_tile=8)
    tiles = work[HEADER : HEADER + TILE_FIELDS * work[0]].reshape(-1, TILE_FIELDS)
    assert (np.diff(tiles[:, 3]) <= 0).all()
    assert tiles[:, 2].sum() == sum(count for _, count in CHUNKS if count > 1)
    assert work[1] == HEADER + tiles.size
    assert len(work) <= longest_list(reads.size, len(CHUNKS), max(map(len, reads.tables)))
