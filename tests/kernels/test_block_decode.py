"""Decodes by programs that read whole blocks ahead, with tiles of several kinds, against float64 attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels import block_decode as module
from ramify.gpu.kernels.block_decode import BlockTiles, shape_of_tiles
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.paged import PagedDecode
from tests.attention_truth import decode_reads
from tests.kernels.gluon import Arriving, overlaps, prepared
from tests.kernels.scene import TOLERANCE, Scene, make_scene
from tests.kernels.test_paged import check, paged_for

Case = tuple[tuple[int, int, int], BlockTiles | None, int | None]  # heads, key-value heads, head_dim; tiles; programs
LENGTHS = (70, 66, 150, 20, 65, 33, 34, 90, 36, 0, 1, 700, 129, 128, 64, 31)
SHARED = (SharedPrefix(4, (1, 0, 4, 2)), SharedPrefix(2, (5, 6, 8)), SharedPrefix(5, (7,)), SharedPrefix(8, (12, 13)))


# Shared prefixes are interpreted where there is no GPU, which computes bfloat16 wrongly.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
HEADS: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128}


@pytest.fixture
def arriving(device: torch.device) -> Iterator[Arriving]:
    if device.type == "cuda" and not overlaps(device):
        pytest.skip("for Hopper")
    with prepared(device, (module, "_decode")) as arriving:
        yield arriving


def in_blocks(scene: Scene, tiles: BlockTiles | None, own_split: int, programs: int | None = None) -> PagedDecode:
    options: dict[str, Any] = {"tiles": tiles or shape_of_tiles(scene.queries.shape[2])}
    if programs is not None:
        options["num_programs"] = programs
    count = len(scene.lengths)
    cuts = EvenCuts(own_split, prefix_split=48)
    return paged_for(scene, max_rows=count, max_parts=40 * count, cuts=cuts, options={"decode_options": options})


def shared_parts(paged: PagedDecode) -> list[torch.Tensor]:
    """Views of what the kernel of prefixes leaves."""
    begins, counts = paged._first_part.tolist(), paged._shared_parts.tolist()
    places = [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True) if count]
    return [parts[place] for parts in (paged._partials, paged._lse) for place in places]


def attend(paged: PagedDecode, scene: Scene, arriving: Arriving, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The kernel before writes queries and the newest positions, or the parts of shared prefixes."""
    queries = scene.queries if rows is None else scene.queries[list(rows)]
    out = torch.full((len(queries), queries[0].numel()), torch.nan, dtype=queries.dtype, device=queries.device)
    late = [queries, scene.kv]
    if scene.shared:
        paged.attend_shared(queries, scene.kv)
        late = shared_parts(paged)
    with arriving(*late):
        options: dict[str, Any] = {"with_prefix": bool(scene.shared), "overlap": overlaps(queries.device)}
        paged.attend_own(queries, scene.kv, out, **options)
    return out


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
def test_a_step(
    shared: Sequence[SharedPrefix], case: Case, own_split: int, device: torch.device, arriving: Arriving
) -> None:
    """Few programs with many items and many with none; NaN wherever nobody wrote."""
    (heads, kv_heads, head_dim), tiles, programs = case
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 16}
    scene = make_scene(LENGTHS, shared, **sizes, dtype=DTYPE, device=device)
    paged = in_blocks(scene, tiles, own_split, programs)
    for _ in range(2):
        paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
        check(attend(paged, scene, arriving), scene)


@pytest.mark.parametrize("block_size", [1, 5, 256])
@pytest.mark.parametrize("own_split", [24, 512])
def test_block_sizes(block_size: int, own_split: int, device: torch.device, arriving: Arriving) -> None:
    scene = make_scene(LENGTHS, **HEADS, block_size=block_size, dtype=torch.float16, device=device)
    paged = in_blocks(scene, None, own_split)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, block_size=block_size)))
    check(attend(paged, scene, arriving), scene)


def test_nan_in_one_row_shows_in_no_other(device: torch.device, arriving: Arriving) -> None:
    scene = make_scene(LENGTHS, **HEADS, block_size=16, dtype=DTYPE, device=device)
    scene.kv[scene.tables[5, 1] * 16, 0] = torch.nan
    paged = in_blocks(scene, None, 512, 3)
    paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    assert attend(paged, scene, arriving).isnan().any(1).nonzero().flatten().tolist() == [5]


def test_rows_that_the_list_does_not_know_are_padding(device: torch.device, arriving: Arriving) -> None:
    scene = make_scene(LENGTHS, **HEADS, block_size=16, dtype=DTYPE, device=device)
    paged = in_blocks(scene, None, 64)
    paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    paged.write_list(paged.work_list(decode_reads(scene.lengths[:4])))
    out = attend(paged, scene, arriving)
    assert (out[4:] == 0).all()
    tolerance = TOLERANCE[DTYPE]
    torch.testing.assert_close(out[:4].cpu().double(), scene.whole_attention()[:4], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shared", [(), SHARED[:1]], ids=["alone", "shared"])
def test_a_row_computes_the_same_bits_in_any_company(
    shared: tuple[SharedPrefix, ...], device: torch.device, arriving: Arriving
) -> None:
    scene = make_scene(LENGTHS, shared, **HEADS, block_size=16, dtype=DTYPE, device=device)
    paged = in_blocks(scene, None, 48)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    among_others = attend(paged, scene, arriving)[[0, 1, 2, 4]]
    paged.tables[:4, : scene.tables.shape[1]] = scene.tables[[0, 1, 2, 4]]
    prefixes = [SharedPrefix(4, (1, 0, 3, 2))] if shared else []
    paged.write_list(paged.work_list(decode_reads([scene.lengths[row] for row in (0, 1, 2, 4)], prefixes)))
    assert torch.equal(attend(paged, scene, arriving, (0, 1, 2, 4)), among_others)
