"""BlockManager against a slow oracle: every track reads back what it wrote, whoever shares its blocks."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramify.engine.blocks import BlockManager
from ramify.errors import CacheExhaustedError, InvalidInputError

NOTHING = -1  # what a free block holds: whoever reads it has read another's block or an unwritten one


def everything(manager: BlockManager) -> dict[str, Any]:
    """The whole state, to show that it did not change."""
    return copy.deepcopy(vars(manager))


class Pool:
    """What a device would hold: blocks of cells."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[NOTHING] * block_size for _ in range(num_blocks)]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.blocks[target] = list(self.blocks[source])

    def write(self, table: tuple[int, ...], start: int, values: list[int]) -> None:
        for position, value in enumerate(values, start):
            self.blocks[table[position // self.block_size]][position % self.block_size] = value

    def read(self, table: tuple[int, ...], length: int) -> list[int]:
        cells = [cell for block in table for cell in self.blocks[block]]
        return cells[:length]

    def clear(self, block: int) -> None:
        self.blocks[block] = [NOTHING] * self.block_size


class BlocksWalk(RuleBasedStateMachine):
    """Tracks are born, forked, extended several at a time, and released, in a pool that is often too small."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.pool = Pool(num_blocks, block_size)
        self.contents: dict[str, list[int]] = {}  # the oracle: what each track wrote, position by position
        self.names = map(str, count())
        self.values = count()  # every value is written once: none can be mistaken for another

    def held(self) -> set[int]:
        return {block for key in self.contents for block in self.manager.table(key)}

    @rule()
    def begin(self) -> None:
        self.contents[next(self.names)] = []

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(sorted(self.contents))), next(self.names)
        free = self.manager.num_free
        self.manager.fork(parent, child)
        self.contents[child] = list(self.contents[parent])
        assert self.manager.table(child) == self.manager.table(parent)
        assert self.manager.num_free == free, "a fork takes no block"

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """One gives up its own and shares another's, as if it were released and that one forked by its name."""
        parent, key = (data.draw(st.sampled_from(sorted(self.contents))) for _ in range(2))
        if parent == key:
            return
        before = self.held()
        self.manager.follow(parent, key)
        self.contents[key] = list(self.contents[parent])
        assert self.manager.table(key) == self.manager.table(parent)
        for block in before - self.held():
            self.pool.clear(block)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def step_together(self, data: st.DataObject) -> None:
        """One more position of tracks that stand at the same one, as beams do."""
        length = len(self.contents[data.draw(st.sampled_from(sorted(self.contents)))])
        keys = [key for key, content in self.contents.items() if len(content) == length and content]
        if not keys or len(keys) > self.manager.num_free:
            return
        tables, copies = self.manager.open_blocks(keys, length)
        assert tables == [self.manager.table(key) for key in keys]
        self.pool.copy(copies)
        for key in keys:
            value = next(self.values)
            self.pool.write(self.manager.table(key), length, [value])
            self.contents[key].append(value)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """As in a plan: all copies are made before anything is written."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.contents)), unique=True, max_size=4))
        copies: list[tuple[int, int]] = []
        writes: list[tuple[str, int, list[int]]] = []
        for key in keys:
            values = [next(self.values) for _ in range(data.draw(st.integers(1, 7)))]
            start = len(self.contents[key])
            extension = self._extend(key, start, start + len(values))
            if extension is not None:
                copies += extension
                writes.append((key, start, values))
        sources, targets = {source for source, _ in copies}, [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert sources.isdisjoint(targets), "the order of copies within a step would matter"
        self.pool.copy(copies)
        for key, start, values in writes:
            self.pool.write(self.manager.table(key), start, values)
            self.contents[key] += values

    def _extend(self, key: str, start: int, end: int) -> list[tuple[int, int]] | None:
        needed, free = self.manager.num_new_blocks(key, start, end), self.manager.num_free
        if needed > free:
            before = everything(self.manager)
            with pytest.raises(CacheExhaustedError, match=f"^{key}: "):
                self.manager.extend(key, start, end)
            assert everything(self.manager) == before, "what was refused has left a trace"
            return None
        copies = self.manager.extend(key, start, end)
        assert self.manager.num_free == free - needed, "the question was answered wrongly"
        assert self.manager.num_new_blocks(key, start, end) == 0
        return copies

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.contents)))
        before = self.held()
        del self.contents[key]
        self.manager.release(key)
        for block in before - self.held():
            self.pool.clear(block)

    @invariant()
    def every_block_is_free_or_counted_as_often_as_it_is_held(self) -> None:
        self.manager.check()
        assert self.manager.num_in_use == len(self.held())
        assert self.manager.num_in_use + self.manager.num_free == self.manager.num_blocks

    @invariant()
    def every_track_reads_back_what_it_wrote(self) -> None:
        for key, content in self.contents.items():
            assert self.pool.read(self.manager.table(key), len(content)) == content

    @invariant()
    def no_track_holds_more_than_one_partly_filled_block(self) -> None:
        for key, content in self.contents.items():
            room = len(self.manager.table(key)) * self.manager.block_size
            assert 0 <= room - len(content) < self.manager.block_size

    @invariant()
    def questions_never_act(self) -> None:
        before = everything(self.manager)
        for key in [*self.contents, "never seen"]:
            self.manager.table(key)
            self.manager.num_new_blocks(key, len(self.contents.get(key, ())), 30)
        self.manager.blocks_for(17)
        assert self.manager.num_free + self.manager.num_in_use == self.manager.num_blocks
        assert everything(self.manager) == before

    def teardown(self) -> None:
        for key in getattr(self, "contents", {}):
            self.manager.release(key)
        if hasattr(self, "manager"):
            self.manager.check()
            assert self.manager.num_free == self.manager.num_blocks, "blocks leaked"


BlocksWalk.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestBlocksWalk = BlocksWalk.TestCase


# -- the picture at the top of the module --------------------------------------------------------------------


def test_the_first_to_write_into_a_shared_partial_block_gets_a_copy_and_the_last_keeps_it() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.extend("parent", 0, 10)
    shared = manager.table("parent")
    manager.fork("parent", "first")
    manager.fork("parent", "second")
    ((source, target),) = manager.extend("first", 10, 11)
    assert source == shared[2]
    assert manager.table("first") == (*shared[:2], target)
    assert len(manager.extend("parent", 10, 11)) == 1
    assert manager.extend("second", 10, 11) == [], "the last holder writes in place"
    assert manager.table("second") == shared


@given(num_blocks=st.integers(3, 6), position=st.integers(0, 12), num_forks=st.integers(0, 2))
def test_the_short_ways_of_a_single_position_do_what_extend_does(
    num_blocks: int, position: int, num_forks: int
) -> None:
    """Where they do anything: an open block, the next block, a copy of a shared one."""
    one, other = (BlockManager(num_blocks, block_size=4) for _ in range(2))
    for manager in (one, other):
        manager.extend("parent", 0, 9)
        for number in range(num_forks):
            manager.fork("parent", f"fork-{number}")
    before = everything(one)
    table, copies = one.open_table("parent", position) or one.append_block("parent", position), []
    if table is None and (pair := one.copy_block("parent", position)) is not None:
        table, copies = one.table("parent"), [pair]
    if table is None:
        assert everything(one) == before
        return
    assert other.extend("parent", position, position + 1) == copies
    assert everything(one) == everything(other)
    assert table == other.table("parent")


def test_full_shared_blocks_are_never_copied() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.extend("parent", 0, 8)
    manager.fork("parent", "child")
    assert manager.extend("child", 8, 9) == []
    assert manager.extend("parent", 8, 9) == []
    assert manager.table("child")[:2] == manager.table("parent")[:2]
    assert manager.num_in_use == 4


@settings(deadline=None)
@given(num_children=st.integers(1, 6), prompt=st.integers(1, 20), output=st.integers(1, 20), size=st.integers(1, 6))
def test_children_cost_their_own_suffix_and_share_the_prompts_full_blocks(
    num_children: int, prompt: int, output: int, size: int
) -> None:
    manager = BlockManager(num_blocks=1000, block_size=size)
    manager.extend("0", 0, prompt)
    for child in range(1, num_children):
        manager.fork("0", str(child))
    assert manager.num_in_use == manager.blocks_for(prompt)
    for position in range(prompt, prompt + output):
        for child in range(num_children):
            manager.extend(str(child), position, position + 1)
            manager.check()
    own = manager.blocks_for(prompt + output) - prompt // size
    assert manager.num_in_use == prompt // size + num_children * own


# -- ends and errors -----------------------------------------------------------------------------------------


def test_exhaustion_changes_nothing_even_where_some_blocks_were_left() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.extend("a", 0, 6)
    manager.fork("a", "b")
    before = everything(manager)
    for key, start, end in (("a", 6, 20), ("b", 6, 17), ("c", 0, 9)):
        with pytest.raises(CacheExhaustedError, match=f"^{key}: "):
            manager.extend(key, start, end)
        assert everything(manager) == before
    assert len(manager.extend("a", 6, 12)) == 1, "what fits still goes in: the copy and one new block"


def test_a_gap_before_the_first_position_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.extend("a", 0, 4)
    before = everything(manager)
    for key, start in (("a", 5), ("b", 1)):
        with pytest.raises(InvalidInputError, match=f"^{key}: positions before {start} "):
            manager.extend(key, start, start + 1)
        assert everything(manager) == before, "what was refused has left a trace"


def test_a_fork_never_replaces_what_its_child_holds() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.extend("a", 0, 4)
    manager.extend("b", 0, 4)
    before = everything(manager)
    with pytest.raises(InvalidInputError, match=r"^b holds blocks already"):
        manager.fork("a", "b")
    assert everything(manager) == before


def test_releasing_twice_or_what_was_never_held_changes_nothing() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.extend("a", 0, 9)
    manager.release("a")
    before = everything(manager)
    manager.release("a")
    manager.release("never seen")
    assert everything(manager) == before
    assert manager.num_free == 4


def test_what_was_freed_last_is_reused_first_and_in_the_same_order() -> None:
    """Its memory was touched lately, and blocks of a prompt that follow each other are read without a copy."""
    manager = BlockManager(num_blocks=5, block_size=1)
    manager.extend("a", 0, 3)
    assert manager.table("a") == (0, 1, 2)
    manager.release("a")
    manager.extend("b", 0, 5)
    assert manager.table("b") == (0, 1, 2, 3, 4)


@settings(deadline=None)
@given(num_tokens=st.integers(0, 100), size=st.integers(1, 20))
def test_blocks_are_counted_by_rounding_up(num_tokens: int, size: int) -> None:
    blocks = BlockManager(num_blocks=1, block_size=size).blocks_for(num_tokens)
    assert (blocks - 1) * size < num_tokens <= blocks * size


@pytest.mark.parametrize("damage", ["leak", "double free", "miscount", "twice in a table"])
def test_the_invariants_notice_damage(damage: str) -> None:
    manager = BlockManager(num_blocks=4, block_size=1)
    manager.extend("a", 0, 2)
    manager.check()
    if damage == "leak":
        manager._free.pop()
    elif damage == "double free":
        manager._free.append(manager._free[0])
    elif damage == "miscount":
        manager._counts[manager.table("a")[0]] += 1
    else:
        manager._tables["a"][1] = manager._tables["a"][0]
    with pytest.raises(AssertionError):
        manager.check()


def test_tracks_that_come_back_must_copy_what_they_share() -> None:
    """Three beams in one partly filled block, swapped out together: back they need it once, and two copies to write.

    The copies were not counted, so a search could come back into a cache that had no room for its next tokens.
    """
    manager = BlockManager(8, 4, num_host_blocks=8)
    manager.extend("a", 0, 6)
    for fork in ("b", "c"):
        manager.fork("a", fork)
    keys = ["a", "b", "c"]
    assert len(manager.swap_out(keys)) == 2
    manager.check()
    assert manager.num_in_use == 0
    assert manager.num_swapped(keys) == 2
    extents = [(key, 6, 7) for key in keys]
    assert manager.num_new_blocks_of(extents) == 2
    assert len(manager.swap_in(keys)) == 2
    assert manager.num_new_blocks_of(extents) == 2
    for key in keys:
        manager.extend(key, 6, 7)
    manager.check()
    assert manager.num_in_use == 4  # the full block once, three of their own
