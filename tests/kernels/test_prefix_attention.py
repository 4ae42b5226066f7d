"""Each row's shared parts against float64 attention of that row alone over the same stretch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels.attention_task import AttentionTask, Sharing
from ramify.gpu.kernels.prefix_attention import prefix_attention
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.kernels.work_list import build_work_list
from tests.attention_truth import decode_reads
from tests.kernels.scene import TOLERANCE, Scene, make_scene

# Sharers of several prefixes lie among each other; rows 3 and 9 share none; row 9 is padding.
LENGTHS = (70, 66, 100, 20, 65, 33, 34, 90, 36, 0)
SHARED = (SharedPrefix(4, (1, 0, 4, 2)), SharedPrefix(2, (5, 6, 8)), SharedPrefix(5, (7,)))


def scene_of(  # one place for the many options
    lengths: Sequence[int],
    shared: Sequence[SharedPrefix],
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 16,
) -> Scene:
    return make_scene(
        lengths,
        shared,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )


def run(scene: Scene, *, prefix_split: int = 48, block_m: int = 16, block_n: int = 16, num_programs: int = 3) -> None:
    device = scene.queries.device
    work = build_work_list(
        decode_reads(scene.lengths, scene.shared, scene.block_size),
        queries_per_row=scene.queries_per_row,
        query_tile=block_m,
        cuts=EvenCuts(64, prefix_split),
    )
    _, heads, head_dim = scene.queries.shape
    partials = torch.full((work.total_parts, heads, head_dim), 7.0, device=device)
    lse = torch.full((work.total_parts, heads), 7.0, device=device)
    task = AttentionTask(
        scene.queries,
        scene.kv,
        scene.tables,
        torch.tensor([len(work.prefix), 5], dtype=torch.int32, device=device),
        torch.cat([torch.zeros(5, dtype=torch.int32), torch.from_numpy(work.prefix).flatten()]).to(device),
        partials,
        lse,
        scene.block_size,
    )
    sharing = Sharing(*(torch.from_numpy(each).to(device) for each in (work.groups, work.members, work.first_part)))
    prefix_attention(task, sharing, num_programs=num_programs, block_m=block_m, block_n=block_n)
    tolerance = TOLERANCE[scene.queries.dtype]
    written = set()
    for prefix in scene.shared:
        end = prefix.num_blocks * scene.block_size
        for row in prefix.sharers:
            for split, start in enumerate(range(0, end, prefix_split)):
                part = int(work.first_part[row]) + split
                written.add(part)
                output, score = scene.attention(row, start, min(start + prefix_split, end))
                torch.testing.assert_close(partials[part].cpu().double(), output, atol=tolerance, rtol=tolerance)
                torch.testing.assert_close(lse[part].cpu().double(), score, atol=tolerance, rtol=tolerance)
    others = [part for part in range(work.total_parts) if part not in written]
    assert others, "rows have parts of their own"
    assert (partials[others] == 7).all()
    assert (lse[others] == 7).all()


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (14, 2), (16, 8), (1, 1)])
def test_head_configurations(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    run(scene_of(LENGTHS, SHARED, dtype, device, heads=heads))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    run(scene_of(LENGTHS, SHARED, dtype, device, head_dim=head_dim), block_m=64, block_n=64, prefix_split=128)


@pytest.mark.parametrize("block_size", [1, 5, 256])
@pytest.mark.parametrize("prefix_split", [24, 1024])
def test_block_sizes_and_splits(block_size: int, prefix_split: int, dtype: torch.dtype, device: torch.device) -> None:
    shared = [SharedPrefix(-(-17 // block_size), (2, 0)), SharedPrefix(-(-37 // block_size), (1, 3))]
    num_shared = {row: prefix.num_blocks * block_size for prefix in shared for row in prefix.sharers}
    lengths = [num_shared[row] + 1 + row for row in range(4)]
    run(scene_of(lengths, shared, dtype, device, block_size=block_size), prefix_split=prefix_split, block_n=32)


@pytest.mark.parametrize("size", [1, 2, 21, 40])
def test_numbers_of_sharers(size: int, device: torch.device) -> None:
    """21 rows of 3 queries fill a tile of 64 to 63; 40 need a second one that begins in the middle of a row."""
    prefix = SharedPrefix(3, tuple(reversed(range(size))))
    scene = scene_of([49] * size, [prefix], torch.float32, device, heads=(3, 1))
    run(scene, block_m=64, block_n=16, prefix_split=32)


@pytest.mark.parametrize("num_programs", [1, 50])
def test_any_number_of_programs_does_all_the_work(num_programs: int, device: torch.device) -> None:
    run(scene_of(LENGTHS, SHARED, torch.float32, device), num_programs=num_programs)
