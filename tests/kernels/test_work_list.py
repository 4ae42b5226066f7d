"""Every position of every row is read exactly once, and where rows are cut depends on nothing else in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.plan import SharedPrefix
from ramify.gpu.kernels.stretches import MOST_OWN_PARTS, MOST_SHARED_PARTS, EvenCuts, PositionCuts, PrefixTiles
from ramify.gpu.kernels.work_list import WorkList, build_work_list
from tests.attention_truth import decode_reads

HOPPER = PrefixTiles(queries=64, positions=64, programs=264, kv_heads=2, queries_per_row=6)


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    shared: list[SharedPrefix]
    block_size: int
    queries_per_row: int
    query_tile: int
    own_split: int
    prefix_split: int

    def build(self) -> WorkList:
        return build_work_list(
            decode_reads(self.lengths, self.shared, self.block_size),
            queries_per_row=self.queries_per_row,
            query_tile=self.query_tile,
            cuts=EvenCuts(self.own_split, self.prefix_split),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(0, 14))
    block_size = draw(st.sampled_from([1, 3, 16, 256]))
    owners = draw(st.lists(st.integers(-1, 3), min_size=rows, max_size=rows))  # -1: no sharer
    shared = []
    lengths = [draw(st.integers(0, 90)) for _ in range(rows)]  # 0: padding
    for owner in sorted({owner for owner in owners if owner >= 0}):
        members = tuple(draw(st.permutations([row for row in range(rows) if owners[row] == owner])))
        blocks = draw(st.integers(0, 9))
        shared.append(SharedPrefix(blocks, members))
        for row in members:
            lengths[row] += blocks * block_size
    small = st.integers(1, 9)
    splits = st.sampled_from([1, 7, 32, 64])
    return Case(lengths, shared, block_size, draw(small), draw(small), draw(splits), draw(splits))


@settings(max_examples=150)
@given(cases())
def test_every_query_sees_every_position_once_and_parts_are_dense(case: Case) -> None:
    work = case.build()
    owner_of_part: dict[int, set[int]] = {}
    # Shared items are seen by each of a row's queries (its query heads of one KV head) on their own.
    seen = np.zeros((len(case.lengths), case.queries_per_row, max(case.lengths, default=0)), dtype=int)
    for row, start, end, part in work.own.tolist():
        assert start < end
        seen[row, :, start:end] += 1
        assert part not in owner_of_part, "an own part is written by one item"
        owner_of_part[part] = {row}
    written = set()
    for group, start, end, first, count, split in work.prefix.tolist():
        assert start < end
        assert 0 < count <= case.query_tile
        representative, first_member = work.groups[group].tolist()
        assert representative in case.shared[group].sharers
        for query in range(first, first + count):
            row = int(work.members[first_member + query // case.queries_per_row])
            assert row in case.shared[group].sharers
            seen[row, query % case.queries_per_row, start:end] += 1
            part = int(work.first_part[row]) + split
            assert (part, query % case.queries_per_row) not in written, "each query writes a part once"
            written.add((part, query % case.queries_per_row))
            owner_of_part.setdefault(part, set()).add(row)
    for row, length in enumerate(case.lengths):
        assert (seen[row, :, :length] == 1).all()
        assert (seen[row, :, length:] == 0).all()
        first, count = int(work.first_part[row]), int(work.num_parts[row])
        assert all(owner_of_part[part] == {row} for part in range(first, first + count))
    assert sorted(owner_of_part) == list(range(work.total_parts))
    assert {array.dtype for array in (work.own, work.prefix, work.groups, work.members)} == {np.dtype(np.int32)}
    assert work.first_part.dtype == work.num_parts.dtype == np.int32


@settings(max_examples=60)
@given(cases())
def test_splits_are_fixed(case: Case) -> None:
    """A row is cut at multiples of a split from where its own part starts: at the same places when it is alone."""
    work = case.build()
    covered = {row: prefix.num_blocks * case.block_size for prefix in case.shared for row in prefix.sharers}
    for row, length in enumerate(case.lengths):
        cuts = work.own[work.own[:, 0] == row, 1:3].tolist()
        begin = covered.get(row, 0)
        split = case.own_split
        while length - begin > MOST_OWN_PARTS * split:
            split *= 2
        expected = [[at, min(at + split, length)] for at in range(begin, length, split)]
        assert cuts == expected
    for number, prefix in enumerate(case.shared):
        cuts = sorted({(start, end) for _, start, end, *_ in work.prefix[work.prefix[:, 0] == number].tolist()})
        length = prefix.num_blocks * case.block_size if prefix.sharers else 0
        assert cuts == [(at, min(at + case.prefix_split, length)) for at in range(0, length, case.prefix_split)]


@settings(max_examples=60)
@given(cases())
def test_there_are_never_more_items_than_parts(case: Case) -> None:
    """Buffers are sized by parts. It holds while a tile takes at least one row's queries."""
    work = case.build()
    if case.query_tile >= case.queries_per_row:
        assert len(work.own) + len(work.prefix) <= work.total_parts


def test_a_row_shorter_than_its_prefix_is_refused() -> None:
    reads = decode_reads([33, 31], [SharedPrefix(2, (0, 1))])
    with pytest.raises(ValueError, match="row 1 is shorter than the prefix it shares"):
        build_work_list(reads, queries_per_row=1, query_tile=16, cuts=EvenCuts(64))


@given(st.integers(1, 512), st.sampled_from([1, 2, 8]), st.integers(1, 20_000), st.data())
def test_no_row_has_more_parts_than_there_is_room_for(
    rows: int, kv_heads: int, longest: int, data: st.DataObject
) -> None:
    blocks, rest = divmod(data.draw(st.integers(1, longest)), 16)
    shared = data.draw(st.sampled_from([(), (SharedPrefix(blocks, (0,)),), (SharedPrefix(blocks // 2, (0,)),)]))
    work = build_work_list(
        decode_reads([16 * blocks + rest], shared),
        queries_per_row=1,
        query_tile=16,
        cuts=EvenCuts.of(rows, kv_heads, data.draw(st.sampled_from([HOPPER, HOPPER._replace(positions=32)]))),
    )
    assert work.total_parts <= EvenCuts.most_parts(longest)


@pytest.mark.parametrize(
    ("rows", "sharers", "positions", "split"),
    [
        (256, 256, 8192, 1664),  # 24 tiles of queries x 2 heads x 5 parts: 240 of 264 programs
        (256, 32, 2048, 448),  # 8 groups x 3 tiles x 2 heads x 5 parts: 240
        (512, 8, 512, 256),  # 64 groups x 2 heads x 2 parts: 256
        (2, 2, 131_072, 131_072 // MOST_SHARED_PARTS),  # as many parts as there may be
        (2, 2, 50, 64),
    ],
)
def test_shared_parts_are_cut_so_that_programs_have_as_much_to_do(
    rows: int, sharers: int, positions: int, split: int
) -> None:
    assert HOPPER.split(positions, sharers, rows) == split


def test_few_rows_are_cut_short_and_many_are_not() -> None:
    splits = [EvenCuts.of(rows, 2).own_split for rows in (1, 16, 17, 32, 64, 128, 256)]
    assert splits == [64, 64, 64, 64, 128, 256, 512]
    assert [EvenCuts.of(rows, 8).own_split for rows in (1, 32, 64, 256, 512)] == [64, 256, 512, 2048, 2048]


def test_the_longest_stretches_come_first() -> None:
    work = build_work_list(decode_reads([70, 300, 5]), queries_per_row=1, query_tile=16, cuts=EvenCuts(128))
    assert [tuple(item) for item in work.own.tolist()] == [
        (1, 0, 128, 1),
        (1, 128, 256, 2),
        (0, 0, 70, 0),
        (1, 256, 300, 3),
        (2, 0, 5, 4),
    ]


@given(st.lists(st.integers(0, 40_000), max_size=6), st.sampled_from([1, 16, 24]), st.data())
def test_cuts_by_position_are_the_same_alone_and_shared(
    lengths: list[int], block_size: int, data: st.DataObject
) -> None:
    """The parts of a row are the stretches between the same positions, in their order, whatever it shares."""
    cuts = PositionCuts(40_000)
    shared = []
    if len(lengths) > 1:
        blocks = cuts.largest_prefix(data.draw(st.integers(0, min(lengths[:2]) // block_size)), block_size)
        shared = [SharedPrefix(blocks, (1, 0))] if blocks else []
    work = build_work_list(decode_reads(lengths, shared, block_size), queries_per_row=2, query_tile=16, cuts=cuts)
    for row, length in enumerate(lengths):
        parts = {part: (start, end) for owner, start, end, part in work.own.tolist() if owner == row}
        if shared and row < 2:
            first = int(work.first_part[row])
            parts |= {first + split: (start, end) for _, start, end, _, _, split in work.prefix.tolist()}
        alone = build_work_list(decode_reads([length]), queries_per_row=2, query_tile=16, cuts=cuts)
        expected = sorted(tuple(item[1:3]) for item in alone.own.tolist())
        first, count = int(work.first_part[row]), int(work.num_parts[row])
        assert [parts[first + index] for index in range(count)] == expected
        assert count <= cuts.most_parts


def test_a_shared_part_that_ends_between_cuts_is_refused() -> None:
    reads = decode_reads([300, 300], [SharedPrefix(2, (0, 1))])
    with pytest.raises(ValueError, match="a shared part does not end at a cut"):
        build_work_list(reads, queries_per_row=1, query_tile=16, cuts=PositionCuts(512))


@given(lengths=st.lists(st.integers(0, 3_000), min_size=1, max_size=9), programs=st.integers(1, 40))
def test_an_item_may_be_all_that_a_row_reads_by_itself(lengths: list[int], programs: int) -> None:
    """Where rows are many, or it is one part anyway; never far more than what others walk meanwhile."""
    sharers = tuple(row for row, length in enumerate(lengths) if length > 256)
    reads = decode_reads(lengths, [SharedPrefix(16, sharers)] if sharers else [], 16)
    options: dict[str, Any] = {"queries_per_row": 2, "query_tile": 32, "cuts": PositionCuts(4_096)}
    parts, work = (build_work_list(reads, **options, programs=each) for each in (None, programs))
    assert np.array_equal(parts.num_parts, work.num_parts)
    longest = 2 * (parts.own[:, 2] - parts.own[:, 1]).sum() / programs
    expected = []
    for row in range(len(lengths)):
        own = sorted(parts.own[parts.own[:, 0] == row].tolist())
        if own and (len(own) == 1 or own[-1][2] - own[0][1] <= longest):
            expected.append([row, own[0][1], own[-1][2], ~own[0][3]])
        else:
            expected += own
    assert sorted(work.own.tolist()) == sorted(expected)
