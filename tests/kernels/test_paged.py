"""A whole decode step through the buffers: against float64 attention, and the same in any company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels.stretches import Cuts, EvenCuts
from ramify.gpu.paged import PagedDecode
from tests.attention_truth import decode_reads
from tests.kernels.scene import TOLERANCE, Scene, make_scene

LENGTHS = (70, 66, 150, 20, 65, 33, 34, 90, 36, 0, 1)
SHARED = (SharedPrefix(4, (1, 0, 4, 2)), SharedPrefix(2, (5, 6, 8)), SharedPrefix(5, (7,)))


# Tiles and programs for scenes that the interpreter can walk; {} for those that engines use.
SMALL: dict[str, Any] = {
    "decode_options": {"num_programs": 3, "block_n": 16},
    "prefix_options": {"num_programs": 2, "block_m": 16, "block_n": 16},
}
SMALL_CUTS = EvenCuts(48, prefix_split=32)


def paged_for(
    scene: Scene,
    *,
    max_rows: int = 12,
    max_parts: int = 64,
    cuts: Cuts | None = SMALL_CUTS,
    options: Mapping[str, Any] = SMALL,
) -> PagedDecode:
    _, heads, head_dim = scene.queries.shape
    paged = PagedDecode(
        max_rows=max_rows,
        max_parts=max_parts,
        max_blocks=scene.tables.shape[1] + 1,
        heads=heads,
        kv_heads=scene.kv.shape[2],
        head_dim=head_dim,
        block_size=scene.block_size,
        dtype=scene.kv.dtype,
        device=scene.kv.device,
        cuts=cuts,
        **options,
    )
    write_tables(paged, scene)
    return paged


def write_tables(paged: PagedDecode, scene: Scene) -> None:
    paged.tables[: scene.tables.shape[0], : scene.tables.shape[1]] = scene.tables


def attend(
    paged: PagedDecode, scene: Scene, rows: Sequence[int] | None = None, *, reads_early: bool = False
) -> torch.Tensor:
    queries = scene.queries if rows is None else scene.queries[list(rows)]
    out = torch.full((len(queries), queries[0].numel()), torch.nan, dtype=queries.dtype, device=queries.device)
    paged.attend(queries, scene.kv, out, with_prefix=bool(scene.shared), reads_early=reads_early)
    return out


def check(out: torch.Tensor, scene: Scene) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), scene.whole_attention(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shared", [(), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1), (18, 1)])
@pytest.mark.parametrize("reads_early", [True, False], ids=["early", "late"])
def test_a_step(
    reads_early: bool,
    shared: Sequence[SharedPrefix],
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    scene = make_scene(
        LENGTHS, shared, heads=heads, kv_heads=kv_heads, head_dim=32, block_size=16, dtype=dtype, device=device
    )
    paged = paged_for(scene, options=SMALL if heads < 16 else {**SMALL, "prefix_options": {"block_m": 32}})
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    check(attend(paged, scene, reads_early=reads_early), scene)


@pytest.mark.parametrize(("block_size", "beside_prompts"), [(16, True), (8, False)])
def test_what_the_same_step_writes_is_not_read_early(
    block_size: int, beside_prompts: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may begin behind blocks of a prompt that is computed beside it, or behind other rows' small ones."""
    scene = make_scene(
        LENGTHS, heads=4, kv_heads=2, head_dim=32, block_size=block_size, dtype=torch.float32, device=device
    )
    paged = paged_for(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, block_size=block_size)))
    monkeypatch.setattr("ramify.gpu.paged.early_decode", None)
    out = torch.full((len(LENGTHS), 4 * 32), torch.nan, device=device)
    paged.attend(scene.queries, scene.kv, out, with_prefix=False, beside_prompts=beside_prompts, reads_early=True)
    check(out, scene)


def test_rows_may_share_all_of_their_positions(dtype: torch.dtype, device: torch.device) -> None:
    shared = (SharedPrefix(4, (0, 2)), SharedPrefix(1, (3, 1)))
    scene = make_scene(
        (64, 17, 80, 16), shared, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=dtype, device=device
    )
    paged = paged_for(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    check(attend(paged, scene), scene)


def test_nan_in_what_some_rows_share_shows_in_these_alone(device: torch.device) -> None:
    scene = make_scene(
        LENGTHS, SHARED, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, device=device
    )
    scene.kv[scene.tables[5, 1] * 16, 0] = torch.nan  # position 16 of rows 5, 6 and 8
    paged = paged_for(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    out = attend(paged, scene)
    assert out.isnan().all(1).nonzero().flatten().tolist() == [5, 6, 8]
    assert not out[[0, 1, 2, 3, 4, 7, 9, 10]].isnan().any()


@pytest.mark.parametrize("reads_early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("position", [0, 15, 60, 149])
def test_nan_of_one_row_shows_in_it_alone(reads_early: bool, position: int, device: torch.device) -> None:
    """And what lies in a block behind a row's last position shows nowhere."""
    scene = make_scene(LENGTHS, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, device=device)
    scene.kv[scene.tables[2, position // 16] * 16 + position % 16, 1] = torch.nan  # row 2 has 150 positions
    scene.kv[scene.tables[0, 4] * 16 + 6 :][:10] = torch.nan  # row 0 has 70
    paged = paged_for(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    out = attend(paged, scene, reads_early=reads_early)
    assert out.isnan().all(1).nonzero().flatten().tolist() == [2]
    assert out.isnan().any(1).nonzero().flatten().tolist() == [2]


def test_one_list_after_the_other(device: torch.device) -> None:
    """What an earlier list left behind, in more rows and with more shared prefixes, does not show."""
    options = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}
    many = make_scene(LENGTHS, SHARED, **options, dtype=torch.float32, device=device)
    few = make_scene((40, 100, 37), (SharedPrefix(2, (0, 2)),), **options, dtype=torch.float32, device=device, seed=1)
    paged = paged_for(many)
    for scene in (many, few, many, few):
        write_tables(paged, scene)
        paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
        check(attend(paged, scene), scene)


def test_rows_that_the_list_does_not_know_are_padding(device: torch.device) -> None:
    scene = make_scene(LENGTHS, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, device=device)
    paged = paged_for(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    paged.write_list(paged.work_list(decode_reads(scene.lengths[:4])))
    out = attend(paged, scene)
    assert (out[4:] == 0).all()
    torch.testing.assert_close(out[:4].cpu().double(), scene.whole_attention()[:4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [(), SHARED], ids=["alone", "shared"])
def test_a_row_computes_the_same_bits_in_any_company(
    shared: tuple[SharedPrefix, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Rows 0, 1, 2, 4 (sharers, where prefixes are shared), first among others, then without them."""
    scene = make_scene(LENGTHS, shared, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=dtype, device=device)
    paged = paged_for(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    among_others = attend(paged, scene)[[0, 1, 2, 4]]
    paged.tables[:4, : scene.tables.shape[1]] = scene.tables[[0, 1, 2, 4]]
    prefixes = [SharedPrefix(4, (1, 0, 3, 2))] if shared else []
    paged.write_list(paged.work_list(decode_reads([scene.lengths[row] for row in (0, 1, 2, 4)], prefixes)))
    assert torch.equal(attend(paged, scene, (0, 1, 2, 4)), among_others)


def test_lists_that_do_not_fit_are_refused(device: torch.device) -> None:
    scene = make_scene((100, 100), heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, device=device)
    paged = paged_for(scene, max_rows=2, max_parts=5)
    with pytest.raises(ValueError, match="a list of 6 parts; there is room for 5"):
        paged.write_list(paged.work_list(decode_reads(scene.lengths)))
    with pytest.raises(ValueError, match="a list of 3 rows; there is room for 2"):
        paged.write_list(paged.work_list(decode_reads([1, 1, 1])))
    with pytest.raises(ValueError, match="20 query heads of one key-value head"):
        PagedDecode(
            max_rows=2,
            max_parts=4,
            max_blocks=4,
            heads=20,
            kv_heads=1,
            head_dim=32,
            block_size=16,
            dtype=torch.float32,
            device=device,
        )
