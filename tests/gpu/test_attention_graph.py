"""A graph of the attention kernels, captured over one list of work, does whatever list comes later."""

from __future__ import annotations

import pytest
import torch

from ramify.engine.plan import SharedPrefix
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
