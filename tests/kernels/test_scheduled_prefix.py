"""Shared prefixes by the kernels for Hopper's matrix units, each way, with their own tiles, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels import divided_prefix, hopper_prefix
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.prefix_ways import DIVIDED, DIVIDED_BESIDE, SCHEDULED, SCHEDULED_BESIDE, PrefixWay
from tests.attention_truth import decode_reads
from tests.kernels.gluon import Arriving, overlaps, prepared
from tests.kernels.scene import make_scene
from tests.kernels.test_paged import check, paged_for


@pytest.fixture
def arriving(device: torch.device) -> Iterator[Arriving]:
    with prepared(device, (hopper_prefix, "scheduled_prefix"), (divided_prefix, "divided_prefix")) as arriving:
        yield arriving


@pytest.mark.parametrize("way", [SCHEDULED, SCHEDULED_BESIDE, DIVIDED, DIVIDED_BESIDE], ids=range(4))
@pytest.mark.parametrize(
    ("block_size", "cuts"), [(16, None), (256, None), (5, EvenCuts(512, 500)), (1, EvenCuts(64, 256))]
)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((12, 2, 128), torch.bfloat16),
        ((7, 1, 128), torch.float16),
        ((4, 4, 128), torch.bfloat16),
        ((8, 2, 64), torch.bfloat16),
    ],
)
def test_rows_of_several_prefixes(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int,
    cuts: EvenCuts | None,
    way: PrefixWay,
    *,
    device: torch.device,
    arriving: Arriving,
) -> None:
    """One tile and several, stretches of one key and of many tiles, rows in no group, rows whose own part is cut."""
    heads, kv_heads, head_dim = sizes
    if device.type == "cuda" and not hopper_prefix.can_schedule(device, dtype, head_dim):
        pytest.skip("for Hopper's matrix units")
    if device.type == "cpu":  # rows' own parts are interpreted
        dtype = torch.float16
    blocks = [-(-positions // block_size) for positions in (900, 129, 1)]
    shared = (
        SharedPrefix(blocks[0], tuple(range(30))),
        SharedPrefix(blocks[1], (31, 30, 33)),
        SharedPrefix(blocks[2], (34, 35)),
    )
    covered = {row: prefix.num_blocks * block_size for prefix in shared for row in prefix.sharers}
    lengths = [covered.get(row, 40) + 1 + 13 * row % 150 for row in range(38)]
    lengths[36] = 0
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    scene = make_scene(lengths, shared, **options, dtype=dtype, device=device)
    paged = paged_for(scene, max_rows=38, max_parts=64 * 38, cuts=cuts, options={"way": way})
    out = torch.full((38, heads * head_dim), torch.nan, dtype=dtype, device=device)
    for _ in range(2 if device.type == "cuda" else 1):  # counters begin at 0 again
        paged.write_list(paged.work_list(decode_reads(scene.lengths, scene.shared, block_size)))
        with arriving(scene.queries):
            paged.attend_shared(scene.queries, scene.kv, overlap=overlaps(device))
        if way.own_options is None:
            paged.attend_own(scene.queries, scene.kv, out, with_prefix=True)
        else:
            paged.attend_beside(scene.queries, scene.kv, out)
        check(out, scene)
