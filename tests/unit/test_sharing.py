"""Which shared prefixes are chosen: against all the ways there are, on small trees of tables."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.blocks import BlockManager
from ramify.engine.plan import Chunk, SharedPrefix
from ramify.engine.shared_reads import SharedReads
from ramify.engine.sharing import Sharing, Table, best_sharing, common_blocks

tables = st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=6).map(
    # A table's block is named by the whole path to it, as in a real pool: equal blocks mean equal beginnings.
    lambda rows: [tuple(hash(tuple(row[: depth + 1])) for depth in range(len(row))) for row in rows]
)


def _partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in _partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for index, part in enumerate(rest):
            yield [*rest[:index], [rows[0], *part], *rest[index + 1 :]]


def _saved(part: list[int], given_tables: list[Table]) -> int:
    depth = min(common_blocks(given_tables[part[0]], given_tables[row]) for row in part)
    return (len(part) - 1) * depth


@given(tables)
@settings(max_examples=200, deadline=None)
def test_shared_prefixes_save_nearly_all_that_can_be_saved(given_tables: list[Table]) -> None:
    chosen = best_sharing(given_tables)
    rows = [row for sharing in chosen for row in sharing.rows]
    assert len(rows) == len(set(rows)), "a row shares two prefixes"
    for sharing in chosen:
        assert sharing.num_blocks > 0
        assert len({given_tables[row][: sharing.num_blocks] for row in sharing.rows}) == 1
        assert all(len(given_tables[row]) >= sharing.num_blocks for row in sharing.rows)
    most = max(
        sum(_saved(part, given_tables) for part in parts) for parts in _partitions(list(range(len(given_tables))))
    )
    # From the leaves up is not always the very best: a prefix chosen below may stand in the way of a better one above.
    assert sum(sharing.saved for sharing in chosen) >= 0.75 * most


def test_the_usual_shapes_are_shared_exactly() -> None:
    prompt = tuple(range(100))
    siblings = [(*prompt, 1000 + row) for row in range(8)]
    assert best_sharing(siblings) == [Sharing(100, tuple(range(8)))]
    two_prompts = [*siblings, *((500, 501, 2000 + row) for row in range(3))]
    assert sorted(best_sharing(two_prompts), key=lambda sharing: sharing.rows) == [
        Sharing(100, tuple(range(8))),
        Sharing(2, (8, 9, 10)),
    ]
    system_prompt_and_questions = [(1, *range(10 * row + 10, 10 * row + 20)) for row in range(4) for _ in range(3)]
    assert sorted(sharing.num_blocks for sharing in best_sharing(system_prompt_and_questions)) == [11] * 4
    assert best_sharing([(1, 2), (3, 4), ()]) == []
    assert best_sharing([]) == []


def test_a_long_chain_of_ever_longer_prefixes_is_no_trouble() -> None:
    chain = [tuple(range(length)) for length in range(2_000)]
    assert sum(sharing.saved for sharing in best_sharing(chain)) > 0


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_blocks_counts_the_equal_beginning(one: list[int], other: list[int]) -> None:
    expected = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        expected += 1
    assert common_blocks(tuple(one), tuple(other)) == expected


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20))
def test_common_blocks_are_counted_wherever_tables_part(common: int, of_one: int, of_other: int) -> None:
    one = (*range(common), *range(100, 100 + of_one))
    other = (*range(common), *range(200, 200 + of_other))
    assert common_blocks(one, other) == common_blocks(other, one) == common


def _siblings(manager: BlockManager, *names: str) -> list[Chunk]:
    """Tracks that hold two blocks together, and a third one each."""
    manager.extend(names[0], 0, 8)
    for name in names[1:]:
        manager.fork(names[0], name)
    for name in names:
        manager.extend(name, 8, 12)
    return [Chunk([7], 9, manager.table(name), name) for name in names]


def test_a_step_without_rows_makes_nobody_forget_who_shares() -> None:
    """While beams wait for a step's result, the step ahead of it is empty."""
    manager = BlockManager(16, 4)
    reads = SharedReads(manager)
    assert reads.find([]) == []
    siblings = _siblings(manager, "a", "b", "c")
    for _ in range(2):
        assert reads.find(siblings) == [SharedPrefix(2, (0, 1, 2))]
        assert reads.find([]) == []


def test_who_comes_shares_and_who_comes_by_a_name_of_one_who_left_does_not() -> None:
    manager = BlockManager(32, 4)
    reads = SharedReads(manager)
    siblings = _siblings(manager, "a", "b", "c")
    assert reads.find(siblings[1:]) == [SharedPrefix(2, (0, 1))]  # a waits
    assert reads.find([*siblings[1:], siblings[0]]) == [SharedPrefix(2, (0, 1, 2))]
    others = _siblings(manager, "d", "e")
    assert sorted(reads.find([*others, *siblings])) == [SharedPrefix(2, (0, 1)), SharedPrefix(2, (2, 3, 4))]
    reads.leave("b")
    assert reads.find([others[0], siblings[0], siblings[2]]) == [SharedPrefix(2, (1, 2))]
    manager.release("b")
    manager.extend("b", 0, 12)
    stranger = Chunk([7], 9, manager.table("b"), "b")
    assert reads.find([stranger, siblings[0], siblings[2]]) == [SharedPrefix(2, (1, 2))]


def test_what_the_same_step_computes_is_shared_in_the_next_one() -> None:
    """Three equal prompts come at once: two hold what the first is computing, of which a GPU's kernels read shared
    blocks before those that write keys and values have ended."""
    prompt = list(range(9))
    manager = BlockManager(16, 4, enable_prefix_caching=True)
    reads = SharedReads(manager)
    manager.extend("old", 0, 4)
    manager.publish("old", 4, lambda start, end: prompt[start:end])
    manager.adopt("first", manager.find(prompt))
    manager.extend("first", 4, 9)
    manager.publish("first", 8, lambda start, end: prompt[start:end])
    first = Chunk(prompt[4:], 4, manager.table("first"), "first")
    others = []
    for name in ("second", "third"):
        assert manager.adopt(name, manager.find(prompt)) == 8
        manager.extend(name, 8, 9)
        others.append(Chunk(prompt[8:], 8, manager.table(name), name))
    assert reads.find([first, *others]) == [SharedPrefix(1, (0, 1, 2))]
    for name in ("first", "second", "third"):
        manager.extend(name, 9, 10)
    nexts = [Chunk([7], 9, manager.table(name), name) for name in ("first", "second", "third")]
    assert reads.find(nexts) == [SharedPrefix(2, (0, 1, 2))]


def test_a_block_that_a_single_row_completes_is_shared_in_the_next_step() -> None:
    manager = BlockManager(16, 4, enable_prefix_caching=True)
    reads = SharedReads(manager)
    tokens = list(range(9))
    manager.extend("first", 0, 8)
    manager.publish("first", 8, lambda start, end: tokens[start:end])
    first = Chunk(tokens[7:8], 7, manager.table("first"), "first")
    others = []
    for name in ("second", "third"):
        manager.adopt(name, manager.find(tokens))
        manager.extend(name, 8, 9)
        others.append(Chunk(tokens[8:], 8, manager.table(name), name))
    assert reads.find([first, *others]) == [SharedPrefix(1, (0, 1, 2))]
    nexts = [Chunk([7], 8, manager.table("first"), "first"), *others]
    assert reads.find(nexts) == [SharedPrefix(2, (0, 1, 2))]
