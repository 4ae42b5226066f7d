"""Rows of a step: who stands where, with which numbers, whoever comes and goes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ramify import SamplingParams
from ramify.device.last_draws import LastDraws
from ramify.device.reads import Int64s
from ramify.device.rows import DrawRows, ModelRows
from ramify.device.seats import Seats
from ramify.engine.demands import Demands
from ramify.engine.plan import PENDING, Chunk, Draw, Member, Onward, Plan, Row, Work
from ramify.sampling.columns import SLOT, Columns

CPU = torch.device("cpu")
DRAWN = torch.arange(100, 108)
KEYS = [f"track-{number}" for number in range(8)]


@given(st.lists(st.lists(st.sampled_from(KEYS), unique=True), max_size=12))
def test_seats_are_dense_and_kept_by_whoever_stays_unless_a_gap_is_filled(steps: list[list[str]]) -> None:
    seats = Seats()
    before: dict[str, int] = {}
    for keys in steps:
        now = dict(zip(keys, seats.take(keys), strict=True))
        assert sorted(now.values()) == list(range(len(keys)))
        moved = [key for key in now if key in before and now[key] != before[key]]
        num_left, num_come = len(before.keys() - now.keys()), len(now.keys() - before.keys())
        assert len(moved) <= max(0, num_left - num_come), "one moves for each that left and that nobody replaced"
        before = now


@given(data=st.data())
def test_decodes_keep_their_numbers_and_prompts_follow(data: st.DataObject) -> None:
    """Tokens, positions and slots of every chunk, in a step of any mix and in the steps that just go on from it."""
    block_size = 4
    rows = ModelRows(8, block_size, CPU, most_captured=16)
    drawn_in: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 4))):
        keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
        chunks = []
        for key in keys:
            start, count = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([1, 1, 1, 2, 7]))
            table = tuple(data.draw(st.permutations(range(10))))
            pending = count == 1 and key in drawn_in and data.draw(st.booleans())
            chunks.append(Chunk([PENDING] if pending else list(range(start, start + count)), start, table, key))
        size = sum(len(chunk.token_ids) for chunk in chunks) + data.draw(st.integers(0, 3))
        has_prompts = any(len(chunk.token_ids) > 1 for chunk in chunks)
        size = size if has_prompts else min(size, 8)
        is_captured = size <= 16 and data.draw(st.booleans())
        last = LastDraws(*_drawn(drawn_in))
        unknown = [chunk.key for chunk in chunks if PENDING in chunk.token_ids]
        members = data.draw(st.lists(st.sampled_from(unknown), unique=True)) if unknown else []
        if members:
            chunks.sort(key=lambda chunk: chunk.key not in members)
            keys = [chunk.key for chunk in chunks]
            count = len(members)
            onward = _onward(chunks[:count], list(drawn_in))
            placed = rows.place(chunks[count:], size, last, onward, is_captured=is_captured)
            check(rows, chunks, placed, drawn_in, size)
            assert placed[:count].tolist() == list(range(count))
        placed = rows.place(chunks, size, last, is_captured=is_captured)
        check(rows, chunks, placed, drawn_in, size)
        drawn_in = dict(zip(keys, data.draw(st.permutations(range(len(keys)))), strict=True))
        if not has_prompts:
            drawing_rows = np.array([drawn_in[key] for key in keys], np.int64)
            for _ in range(number):
                chunks = [Chunk([PENDING], chunk.start + 1, chunk.block_table, chunk.key) for chunk in chunks]
                rows.go_on([chunk.block_table for chunk in chunks], placed, drawing_rows)
                check(rows, chunks, placed, drawn_in, size)


def _drawn(drawn_in: dict[str, int]) -> tuple[Plan, Int64s]:
    """A plan that drew for these tracks, and the rows it drew in."""
    work = Work([Chunk([7], 0, (0,), key) for key in drawn_in])
    demands = Demands(SamplingParams())
    draws = [Draw(key, 0, 0, 0, (Row(0, index, 0),), demands) for index, key in enumerate(drawn_in)]
    return Plan([work], draws), np.array(list(drawn_in.values()), np.int64)


def _onward(chunks: list[Chunk], drawn: list[str]) -> Onward:
    return Onward(
        members=[Member(chunk.key, chunk.key, 0, Demands(SamplingParams()), []) for chunk in chunks],
        changed=(),
        asked=frozenset(),
        positions=np.array([chunk.start for chunk in chunks]),
        places=np.ones(len(chunks), np.int64),
        blocks=np.array([chunk.block_table[chunk.start // 4] for chunk in chunks]),
        tables=[chunk.block_table for chunk in chunks],
        sources=np.array([drawn.index(chunk.key) for chunk in chunks]),
    )


def check(rows: ModelRows, chunks: list[Chunk], placed: Int64s, drawn_in: dict[str, int], size: int) -> None:
    token_ids, positions, slots = (column.tolist() for column in rows.batch(size, DRAWN))
    assert len(token_ids) == size
    seen = set()
    for chunk, first in zip(chunks, placed.tolist(), strict=True):
        for offset, token in enumerate(chunk.token_ids):
            row, position = first + offset, chunk.start + offset
            seen.add(row)
            assert token_ids[row] == (DRAWN[drawn_in[chunk.key]] if token == PENDING else token)
            assert positions[row] == position
            assert slots[row] == chunk.block_table[position // 4] * 4 + position % 4
    assert len(seen) == sum(len(chunk.token_ids) for chunk in chunks), "no two in one row"
    assert all(slots[row] < 0 for row in range(size) if row not in seen), "padding is kept nowhere"


@given(data=st.data())
def test_rows_of_draws_hold_what_a_fresh_table_would(data: st.DataObject) -> None:
    """Numbers are written only for who is new in a row; another request under the same child number is new too."""
    rows, seats = DrawRows(8, CPU), Seats()
    requests = [Demands(SamplingParams(top_k=3 + n, seed=n), number=n, seed=n - 4) for n in range(6)]
    for step in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.sampled_from(requests), min_size=1, unique=True))
        draws = [Draw("r", 0, data.draw(st.integers(0, 1)), step, (), demands) for demands in chosen]
        # A key may come back with another request behind it.
        placed = np.array(seats.take([f"{draw.demands.number % 4}-{draw.child}-{i}" for i, draw in enumerate(draws)]))
        slots = np.array([draw.demands.number % 3 - 1 for draw in draws])
        rows.settle(draws, placed, 8, slots=slots)
        expected = Columns.of(draws)
        expected.integers[SLOT] = slots
        integers, floats = rows.columns(8)
        assert (integers.numpy()[:, placed] == expected.integers).all()
        assert (floats.numpy()[:, placed] == expected.floats).all()
        assert (floats[0, len(draws) :] == 0).all(), "padding is greedy: it needs no noise"
