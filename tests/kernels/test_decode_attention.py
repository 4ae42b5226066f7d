"""Each item's part against float64 attention over the same stretch."""

from __future__ import annotations

import pytest
import torch

from ramify.gpu.kernels.attention_task import AttentionTask
from ramify.gpu.kernels.decode_attention import decode_attention
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.kernels.work_list import build_work_list
from tests.attention_truth import decode_reads
from tests.kernels.scene import TOLERANCE, Scene, make_scene

LENGTHS = (1, 40, 0, 16, 97, 5)  # one position, several splits, padding, exactly one block


def run(scene: Scene, own_split: int, num_programs: int = 3, block_n: int = 16) -> None:
    device = scene.queries.device
    work = build_work_list(
        decode_reads(scene.lengths, block_size=scene.block_size),
        queries_per_row=scene.queries_per_row,
        query_tile=64,
        cuts=EvenCuts(own_split),
    )
    _, heads, head_dim = scene.queries.shape
    partials = torch.full((work.total_parts + 1, heads, head_dim), 7.0, device=device)  # one part more than is written
    lse = torch.full((work.total_parts + 1, heads), 7.0, device=device)
    task = AttentionTask(
        scene.queries,
        scene.kv,
        scene.tables,
        torch.tensor([len(work.own), 3], dtype=torch.int32, device=device),
        torch.cat([torch.zeros(3, dtype=torch.int32), torch.from_numpy(work.own).flatten()]).to(device),
        partials,
        lse,
        scene.block_size,
    )
    decode_attention(task, None, num_programs=num_programs, block_n=block_n)
    tolerance = TOLERANCE[scene.queries.dtype]
    for row, start, end, part in work.own.tolist():
        output, score = scene.attention(row, start, end)
        torch.testing.assert_close(partials[part].cpu().double(), output, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[part].cpu().double(), score, atol=tolerance, rtol=tolerance)
    assert (partials[-1] == 7).all()
    assert (lse[-1] == 7).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (14, 2), (16, 8), (1, 1)])
def test_head_configurations(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    scene = make_scene(LENGTHS, heads=heads, kv_heads=kv_heads, head_dim=32, block_size=16, dtype=dtype, device=device)
    run(scene, own_split=32)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    scene = make_scene(LENGTHS, heads=4, kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype, device=device)
    run(scene, own_split=64, block_n=64)


@pytest.mark.parametrize("block_size", [1, 5, 256])
@pytest.mark.parametrize("own_split", [24, 512])
def test_block_sizes_and_splits(block_size: int, own_split: int, dtype: torch.dtype, device: torch.device) -> None:
    scene = make_scene(LENGTHS, heads=4, kv_heads=2, head_dim=32, block_size=block_size, dtype=dtype, device=device)
    run(scene, own_split)


@pytest.mark.parametrize("num_programs", [1, 7, 100])
def test_any_number_of_programs_does_all_the_work(num_programs: int, device: torch.device) -> None:
    scene = make_scene(LENGTHS, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, device=device)
    run(scene, 32, num_programs)


def test_queries_may_be_a_slice_of_something_wider(dtype: torch.dtype, device: torch.device) -> None:
    """Queries, keys and values often come out of one product."""
    scene = make_scene(LENGTHS, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=dtype, device=device)
    wide = torch.full((len(LENGTHS), 8, 32), torch.nan, dtype=dtype, device=device)
    wide[:, :4] = scene.queries
    run(Scene(wide[:, :4], scene.kv, scene.tables, scene.lengths, (), scene.block_size), 32)


def test_nan_shows_in_its_own_parts_and_in_no_other(device: torch.device) -> None:
    scene = make_scene((40, 40), heads=2, kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32, device=device)
    scene.kv[scene.tables[0, 1] * 16, 0] = torch.nan  # position 16 of row 0
    partials, lse = torch.zeros(4, 2, 32, device=device), torch.zeros(4, 2, device=device)
    work = build_work_list(decode_reads((40, 40)), queries_per_row=2, query_tile=64, cuts=EvenCuts(32))
    task = AttentionTask(
        scene.queries,
        scene.kv,
        scene.tables,
        torch.tensor([len(work.own), 0], dtype=torch.int32, device=device),
        torch.from_numpy(work.own).to(device),
        partials,
        lse,
        16,
    )
    decode_attention(task, None, num_programs=2, block_n=16)
    assert partials.isnan().all(2).all(1).tolist() == [True, False, False, False]
    assert lse.isnan().all(1).tolist() == [True, False, False, False]
    assert not partials[1:].isnan().any()
