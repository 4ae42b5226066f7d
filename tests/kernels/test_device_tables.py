"""The device's copy of block tables: whoever comes and goes, each row holds its track's blocks."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.device.reads import Reads
from ramify.device.seats import Seats
from ramify.gpu.tables import DeviceTables

KEYS = [f"track-{number}" for number in range(8)]


@given(data=st.data())
@settings(max_examples=60)
def test_every_row_has_its_tracks_table_whatever_comes_and_goes(data: st.DataObject) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_device = torch.full((8, 6), -1, dtype=torch.int32, device=device)
    held, seats = DeviceTables(on_device), Seats()
    tables: dict[str, tuple[int, ...]] = {}
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
        rows = np.array(seats.take(present), np.int64)
        ones = np.ones(len(present), np.int64)
        own = [tables[key] for key in present]
        held.follow(Reads.of(rows, ones, ones, own, [], block_size=16, size=len(present)))
        for key, row in zip(present, rows.tolist(), strict=True):
            assert tuple(on_device[row, : len(tables[key])].tolist()) == tables[key]


def test_a_step_that_breaks_off_while_tables_are_sent_leaves_no_row_half_known() -> None:
    """At every line: what was there before, and comes again, is sent again."""
    old, new = (1, 2, 3), (1, 7, 8, 9)
    rows, ones = np.zeros(1, np.int64), np.ones(1, np.int64)

    def follow(held: DeviceTables, table: tuple[int, ...]) -> None:
        held.follow(Reads.of(rows, ones, ones, [table], [], block_size=16, size=1))

    for place in range(1, 100):
        on_device = torch.full((1, 6), -1, dtype=torch.int32)
        held, left = DeviceTables(on_device), place
        follow(held, old)

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith("tables.py"):
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            follow(held, new)
        except KeyboardInterrupt:
            sys.settrace(before)
            follow(held, old)
            assert tuple(on_device[0, :3].tolist()) == old, place
        else:
            sys.settrace(before)
            assert place > 20
            return
    pytest.fail("it came to no end")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU a copy is made at once")
def test_steps_that_nobody_waits_for_are_told_their_own_tables() -> None:
    """The device is busy while the host goes on: what is sent for one step stays what it was until it has arrived."""
    on_device = torch.full((1, 4), -1, dtype=torch.int32, device="cuda")
    held, rows, ones, seen = DeviceTables(on_device), np.zeros(1, np.int64), np.ones(1, np.int64), []
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
    for step in range(8):
        held.follow(Reads.of(rows, ones, ones, [(step, step + 1)], [], block_size=16, size=1))
        seen.append(on_device[0, :2].clone())
    assert [tables.tolist() for tables in seen] == [[step, step + 1] for step in range(8)]
