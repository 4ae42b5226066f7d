"""Warming up: every size of a graph that decodes may need is among those that are run."""

from __future__ import annotations

import pytest

from ramify.device.graphs import padded
from ramify.device.rehearsal import Largest
from ramify.device.warmup import decodes, numbers_of_sequences


@pytest.mark.parametrize(("num_models", "num_tracks"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 100, 500, 512])
def test_every_size_occurs(num_models: int, num_tracks: int, max_num_seqs: int) -> None:
    largest = Largest(num_models, num_tracks, max_num_seqs, 4096, 8192, 16)
    counts = numbers_of_sequences(largest)
    assert counts == sorted(counts, reverse=True)
    assert max(counts) <= max_num_seqs
    rows = num_tracks // num_models
    run = {(padded(count), padded(count * rows)) for count in counts}
    assert run == {(padded(count), padded(count * rows)) for count in range(1, max_num_seqs + 1)}


@pytest.mark.parametrize("max_model_len", [1, 16, 40, 4096])
def test_decodes_share_what_was_computed_before_them(max_model_len: int) -> None:
    largest = Largest(2, 2, 8, max_model_len, 64, 16)
    for is_shared in (False, True):
        plan = decodes(largest, 3, 5, is_shared=is_shared)
        for work in plan.works:
            assert len(work.chunks) == 3
            assert all(chunk.end <= max_model_len and max(chunk.block_table) < 5 for chunk in work.chunks)
            assert bool(work.shared) == (is_shared and max_model_len > 16)
            for prefix in work.shared:
                assert prefix.num_blocks * 16 <= work.chunks[0].start
