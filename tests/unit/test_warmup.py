"""Warming up: every size of a graph that decodes may need is among those that are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramify.device.graphs import MOST_ROWS_WITH_PROMPTS, Graphs, Tally, padded, padded_with_prompts
from ramify.device.rehearsal import Largest
from ramify.device.warmup import decodes, numbers_of_sequences, prompts, rows_with_prompts, warm_up


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


@pytest.mark.parametrize(("num_models", "num_tracks"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("most_tokens", "max_num_seqs", "max_model_len"), [(8192, 512, 4096), (100, 3, 40), (64, 1, 16)]
)
def test_every_size_with_prompts_occurs(
    num_models: int, num_tracks: int, most_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    largest = Largest(num_models, num_tracks, max_num_seqs, max_model_len, most_tokens, 16)
    sizes = rows_with_prompts(largest)
    assert sizes == sorted(sizes, reverse=True)
    rows_each = num_tracks // num_models
    most = min(MOST_ROWS_WITH_PROMPTS, most_tokens, max_num_seqs * max_model_len * rows_each)
    assert {padded_with_prompts(size) for size in sizes} == {padded_with_prompts(rows) for rows in range(2, most + 1)}
    for size in sizes:
        for is_shared in (False, True):
            plan = prompts(largest, size, 5, is_shared=is_shared)
            assert len(plan.draws) <= max_num_seqs
            for work in plan.works:
                rows = sum(len(chunk.token_ids) for chunk in work.chunks)
                assert padded_with_prompts(rows) == padded_with_prompts(size)
                assert rows > len(work.chunks), "a prompt is among them"
                assert all(chunk.end <= max_model_len for chunk in work.chunks)
                singles = all(
                    len(work.chunks[sharer].token_ids) == 1 for each in work.shared for sharer in each.sharers
                )
                assert singles, "decodes alone share"
            assert is_shared or not any(work.shared for work in plan.works)


def test_sizes_with_prompts_waste_little() -> None:
    for count in range(256, MOST_ROWS_WITH_PROMPTS + 1):
        assert count <= padded_with_prompts(count) < 1.25 * count
    with pytest.raises(ValueError, match="4097"):
        padded_with_prompts(MOST_ROWS_WITH_PROMPTS + 1)


class Device:
    """Notes what is run; every launch takes a third of a second by the test's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rows: list[tuple[int, bool]] = []
        self.draws: list[int] = []
        self.is_reset = False
        self.captures_prompts = False
        self.warming_up = Graphs(torch.device("cpu")).warming_up
        self.made = {"decodes": Tally(9, 2.04), "draws": Tally(120, 0.91)}

    def launch(self, plan: Any) -> Any:
        [work] = plan.works
        self.rows.append((len(work.chunks), bool(work.shared)))
        self.seconds += 1 / 3
        return lambda: None

    def capture_draws(self, count: int) -> None:
        self.draws.append(count)

    def reset(self) -> None:
        self.is_reset = True


def test_warming_up_runs_every_size_and_says_how_far_it_is() -> None:
    device = Device()
    said: list[str] = []
    warm_up(device, Largest(1, 1, 8, 4096, 8192, 16), 100, said.append, clock=lambda: device.seconds)  # type: ignore[arg-type]
    assert device.rows == [
        (8, False),
        (8, True),
        (4, False),
        (4, True),
        (3, False),
        (3, True),
        (2, False),
        (2, True),
        (1, False),
    ]
    assert device.draws == [8, 4, 3, 2, 1]
    assert device.is_reset
    assert said == [
        "Captured 0 of 5 sizes of CUDA graphs",
        "Captured 2 of 5 sizes of CUDA graphs",
        "Captured 4 of 5 sizes of CUDA graphs",
        "Captured all 5 sizes of CUDA graphs in 3.0 s: 9 of decodes in 2.0 s, 120 of draws in 0.9 s",
    ]
