"""Rows of the device's buffers: whoever comes and goes, each row holds the table and the numbers of its track."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cuda.rows import TOKEN, DeviceRows
from ramify.plan import Chunk, Rules
from ramify.sampling_params import SamplingParams

KEYS = [f"track-{number}" for number in range(8)]


@given(data=st.data())
@settings(max_examples=60)
def test_every_row_has_its_tracks_table_whatever_comes_and_goes(data: st.DataObject) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = DeviceRows(torch.full((8, 6), -1, dtype=torch.int32, device=device))
    tables: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        present = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
        for key in present:
            change = data.draw(st.sampled_from(["stay", "append", "replace", "copy last"]))
            table = tables.get(key, (0,))
            if change == "append" and len(table) < 6:
                table = (*table, data.draw(st.integers(0, 99)))
            elif change == "replace":  # as after a swap: other blocks, perhaps fewer
                table = tuple(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=6)))
            elif change == "copy last":
                table = (*table[:-1], data.draw(st.integers(100, 199)))
            tables[key] = table
        placed = rows.place([Chunk(0, (1,), 0, tables[key], key) for key in present])
        assert sorted(placed) == list(range(len(present)))
        for key, row in zip(present, placed, strict=True):
            assert tuple(rows.tables[row, : len(tables[key])].tolist()) == tables[key]
            if rows.rules[row] is None and key in numbers:
                del numbers[key]  # it was away: its numbers are set anew
            if key in numbers:
                assert rows.integer_mirror[TOKEN, row] == numbers[key]
        for key, row in zip(present, placed, strict=True):
            numbers[key] = data.draw(st.integers(0, 1000))
            rows.integer_mirror[TOKEN, row] = numbers[key]
            rows.rules[row] = Rules(SamplingParams())
        for key in [key for key in numbers if key not in present]:
            del numbers[key]
