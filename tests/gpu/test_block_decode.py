"""Decodes by programs that read whole blocks ahead, with tiles of several kinds, against float64 attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels.block_decode import TOGETHER, BlockTiles, shape_of_tiles, tiles_for
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.paged import PagedDecode
from tests.attention_truth import decode_reads
from tests.kernels.scene import Scene, make_scene
from tests.kernels.test_paged import attend, check, paged_for

Case = tuple[tuple[int, int, int], BlockTiles | None, int | None]  # heads, key-value heads, head_dim; tiles; programs
LENGTHS = (70, 66, 150, 20, 65, 33, 34, 90, 36, 0, 1, 700, 129, 128, 64, 31)
SHARED = (SharedPrefix(4, (1, 0, 4, 2)), SharedPrefix(2, (5, 6, 8)), SharedPrefix(5, (7,)), SharedPrefix(8, (12, 13)))


def in_blocks(scene: Scene, tiles: BlockTiles | None, own_split: int, programs: int | None = None) -> PagedDecode:
    _, heads, head_dim = scene.queries.shape
    if tiles_for(scene.kv.device, scene.kv.dtype, heads, TOGETHER, head_dim) is None:
        pytest.skip("for Hopper")
    options: dict[str, Any] = {"tiles": tiles or shape_of_tiles(head_dim)}
    if programs is not None:
        options["num_programs"] = programs
    count = len(scene.lengths)
    cuts = EvenCuts(own_split, prefix_split=48)
    return paged_for(scene, max_rows=count, max_parts=40 * count, cuts=cuts, options={"decode_options": options})


@pytest.mark.parametrize("shared", [(), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "case",
    [
        ((16, 8, 128), None, None),
        ((16, 8, 128), BlockTiles(8, 16, 2, 8), 7),
        ((16, 8, 128), BlockTiles(2, 32, 4, 4), 3),
        ((16, 8, 128), BlockTiles(1, 64, 3, 4), 3),
        ((12, 2, 128), BlockTiles(2, 64, 3, 8), None),
        ((12, 2, 128), BlockTiles(2, 16, 6, 2), 2),
        ((32, 8, 64), None, None),
        ((28, 4, 128), None, 5),
        ((15, 5, 64), BlockTiles(1, 64, 3, 4), 4),
        ((9, 3, 64), BlockTiles(1, 32, 2, 1), 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("own_split", [48, 512])
def test_a_step(shared: Sequence[SharedPrefix], case: Case, own_split: int, device: torch.device) -> None:
    """Few programs with many items and many with none; NaN wherever nobody wrote."""
    (heads, kv_heads, head_dim), tiles, programs = case
    scene = make_scene(
        LENGTHS,
        shared,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=torch.bfloat16,
        device=device,
    )
    paged = in_blocks(scene, tiles, own_split, programs)
    for _ in range(2):
        paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
        check(attend(paged, scene), scene)


@pytest.mark.parametrize("block_size", [1, 5, 256])
@pytest.mark.parametrize("own_split", [24, 512])
def test_block_sizes(block_size: int, own_split: int, device: torch.device) -> None:
    options: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128, "block_size": block_size}
    scene = make_scene(LENGTHS, **options, dtype=torch.float16, device=device)
    paged = in_blocks(scene, None, own_split)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, block_size=block_size)))
    check(attend(paged, scene), scene)


def test_nan_in_one_row_shows_in_no_other(device: torch.device) -> None:
    options: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128, "block_size": 16}
    scene = make_scene(LENGTHS, **options, dtype=torch.bfloat16, device=device)
    scene.kv[scene.tables[5, 1] * 16, 0] = torch.nan
    paged = in_blocks(scene, None, 512, 3)
    paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    assert attend(paged, scene).isnan().any(1).nonzero().flatten().tolist() == [5]


def test_rows_that_the_list_does_not_know_are_padding(device: torch.device) -> None:
    options: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128, "block_size": 16}
    scene = make_scene(LENGTHS, **options, dtype=torch.bfloat16, device=device)
    paged = in_blocks(scene, None, 64)
    paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    paged.write_list(paged.work_list(decode_reads(scene.lengths[:4])))
    out = attend(paged, scene)
    assert (out[4:] == 0).all()
    tolerance = 2e-2
    torch.testing.assert_close(out[:4].cpu().double(), scene.whole_attention()[:4], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shared", [(), SHARED[:1]], ids=["alone", "shared"])
def test_a_row_computes_the_same_bits_in_any_company(shared: tuple[SharedPrefix, ...], device: torch.device) -> None:
    options: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128, "block_size": 16}
    scene = make_scene(LENGTHS, shared, **options, dtype=torch.bfloat16, device=device)
    paged = in_blocks(scene, None, 48)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    among_others = attend(paged, scene)[[0, 1, 2, 4]]
    paged.tables[:4, : scene.tables.shape[1]] = scene.tables[[0, 1, 2, 4]]
    prefixes = [SharedPrefix(4, (1, 0, 3, 2))] if shared else []
    paged.write_list(paged.work_list(decode_reads([scene.lengths[row] for row in (0, 1, 2, 4)], prefixes)))
    assert torch.equal(attend(paged, scene, (0, 1, 2, 4)), among_others)
