"""A graph of the attention kernels, captured over one list of work, does whatever list comes later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.rope_write import rope_and_write
from ramify.gpu.paged import PagedDecode
from tests.attention_truth import decode_reads
from tests.kernels.scene import Scene, make_scene
from tests.kernels.test_paged import check, write_tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_prefix", [False, True])
def test_a_graph_outlives_its_lists(with_prefix: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Captured over one list, replayed over others with other rows, lengths and shared prefixes; default tile sizes."""
    options = {"heads": 12, "kv_heads": 2, "head_dim": 128, "block_size": 16}
    lengths = [(1500, 1100, 1030, 7), (1025, 3000, 2000, 1200), (5, 600, 513, 512)]
    shared = [(SharedPrefix(64, (0, 2)),), (SharedPrefix(64, (3, 0)), SharedPrefix(90, (1, 2))), ()]
    scenes = [
        make_scene(length, prefixes if with_prefix else (), **options, dtype=dtype, device=device, seed=seed)
        for seed, (length, prefixes) in enumerate(zip(lengths, shared, strict=True))
    ]
    slots = max(len(scene.kv) for scene in scenes)
    kv = torch.full((slots, 2, 2, 128), torch.nan, dtype=dtype, device=device)
    queries = torch.zeros(4, 12, 128, dtype=dtype, device=device)
    out = torch.zeros(4, 12 * 128, dtype=dtype, device=device)
    paged = PagedDecode(
        max_rows=4,
        max_parts=64,
        max_blocks=200,
        heads=12,
        kv_heads=2,
        head_dim=128,
        block_size=16,
        dtype=dtype,
        device=device,
    )

    def load(scene: Scene) -> None:
        kv[: len(scene.kv)] = scene.kv
        queries.copy_(scene.queries)
        write_tables(paged, scene)
        paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))

    load(scenes[0])
    paged.attend(queries, kv, out, with_prefix=with_prefix)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged.attend(queries, kv, out, with_prefix=with_prefix)
    for scene in (*scenes, *scenes):
        load(scene)
        graph.replay()
        check(out, scene)


def test_what_the_kernel_before_writes_is_seen(device: torch.device) -> None:
    """Rotation writes a row's newest positions while attention over them has begun; up to nine of one sequence."""
    rows, heads, kv_heads, head_dim, blocks = 12, 16, 2, 128, 40
    numbers = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    qkv = torch.zeros(rows, (heads + 2 * kv_heads) * head_dim, **options)
    positions, slots = torch.zeros(2, rows, dtype=torch.int64, device=device)
    kv = torch.randn(4 * blocks * 16, 2, kv_heads, head_dim, generator=numbers, **options)
    queries = torch.zeros(rows, heads, head_dim, **options)
    out = torch.zeros(rows, heads * head_dim, **options)
    frequencies = 1e-2 * torch.ones(head_dim // 2, device=device)
    owners = torch.tensor([0, 1, 2, *[3] * 9], device=device)  # of rows: three sequences, and drafts of a fourth
    ahead = torch.tensor([0, 0, 0, *range(9)], device=device)
    sizes: dict[str, Any] = {
        "max_rows": rows,
        "max_parts": 400,
        "max_blocks": blocks,
        "heads": heads,
        "kv_heads": kv_heads,
    }
    paged = PagedDecode(**sizes, head_dim=head_dim, block_size=16, **options)
    paged.tables[:, :] = owners[:, None] * blocks + torch.arange(blocks, device=device)

    def step(*, early: bool) -> None:
        qkv.mul_(1)  # a kernel that overlaps with nothing
        pool = (positions, slots, frequencies, 1.0, queries, kv)
        rope_and_write(Parts.whole(qkv), *pool, overlap=early)
        paged.attend(queries, kv, out, with_prefix=False, overlap=early, reads_early=early)

    lengths = torch.tensor([1, 63, 130, 40], device=device)
    graph = torch.cuda.CUDAGraph()
    for turn in range(200):
        qkv.normal_(generator=numbers)
        positions.copy_(lengths[owners] + ahead + (3 * turn) % 400)
        slots.copy_(owners * blocks * 16 + positions)
        ends = [position + 1 for position in positions.tolist()]
        paged.write_list(paged.work_list(decode_reads(ends)))
        if turn == 0:
            step(early=True)  # compiles
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step(early=True)
        kv[slots] = torch.nan  # or what stood there before might pass for what is written
        graph.replay()
        seen = out.clone()
        step(early=False)
        torch.testing.assert_close(seen, out, atol=2e-2, rtol=2e-2)
