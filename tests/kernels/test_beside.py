"""Own parts read beside the kernel of shared prefixes, and merged by a kernel of their own, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.paged import PagedDecode
from ramify.gpu.prefix_ways import way_for
from tests.attention_truth import decode_reads
from tests.kernels.scene import Scene, make_scene
from tests.kernels.test_paged import LENGTHS, SHARED, SMALL, attend, check, paged_for


def beside(scene: Scene, *, own_split: int = 48, programs: int = 3) -> PagedDecode:
    own: dict[str, Any] = {"num_programs": programs, "block_n": 16, "max_registers": None}
    plain = way_for(scene.kv.device, scene.kv.dtype, scene.queries.shape[2], exact=False)
    way = replace(plain, own_options=own)
    return paged_for(scene, cuts=EvenCuts(own_split, prefix_split=32), options={**SMALL, "way": way})


@pytest.mark.parametrize("own_split", [16, 48])
@pytest.mark.parametrize("programs", [1, 3, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1)])
def test_a_step(
    heads: int, kv_heads: int, programs: int, own_split: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of several own parts, rows in no group and padding; twice, so that the counter begins at 0 again."""
    options: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": 32, "block_size": 16}
    scene = make_scene(LENGTHS, SHARED, **options, dtype=dtype, device=device)
    paged = beside(scene, own_split=own_split, programs=programs)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    for _ in range(2):
        check(attend(paged, scene), scene)


def test_rows_may_share_all_of_their_positions(device: torch.device) -> None:
    shared = (SharedPrefix(4, (0, 2)), SharedPrefix(1, (3, 1)))
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}
    scene = make_scene((64, 17, 80, 16), shared, **options, dtype=torch.float32, device=device)
    paged = beside(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    check(attend(paged, scene), scene)


def test_nan_in_one_row_shows_in_no_other(device: torch.device) -> None:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}
    scene = make_scene(LENGTHS, SHARED, **options, dtype=torch.float32, device=device)
    scene.kv[scene.tables[5, 2] * 16, 0] = torch.nan  # behind what row 5 shares
    paged = beside(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    assert attend(paged, scene).isnan().any(1).nonzero().flatten().tolist() == [5]


def test_a_row_computes_the_same_bits_in_any_company(dtype: torch.dtype, device: torch.device) -> None:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}
    scene = make_scene(LENGTHS, SHARED, **options, dtype=dtype, device=device)
    paged = beside(scene)
    paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared)))
    among_others = attend(paged, scene)[[0, 1, 2, 4]]
    paged.tables[:4, : scene.tables.shape[1]] = scene.tables[[0, 1, 2, 4]]
    prefixes = [SharedPrefix(4, (1, 0, 3, 2))]
    paged.write_list(paged.work_list(decode_reads([scene.lengths[row] for row in (0, 1, 2, 4)], prefixes)))
    assert torch.equal(attend(paged, scene, (0, 1, 2, 4)), among_others)
