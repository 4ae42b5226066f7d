"""The cohort: sequences that just go on, in columns, so that a step of many costs the host what changes in it.

A sequence joins once it has drawn a token that the next step may compute unseen. From then on it needs nothing of its
own in most steps: its position is one more, and its block the same. Only who opens a block, comes or leaves is looked
at. For 512 rows this saves the host four fifths of a step.

    member    0    1    2    3             1 leaves             0    1    2
              a    b    c    d             d takes its place    a    d    c
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np

from ramify.engine.blocks import BlockManager
from ramify.engine.demands import Demands, SamplerChoice
from ramify.engine.plan import BlockCopy, Member, Onward
from ramify.engine.schedule import GoingOn
from ramify.engine.search.child import Child
from ramify.engine.sequence import Order, Sequence, Track
from ramify.structured.matcher import Matcher

# Columns of numbers: the position to compute next, its block, the place in the output of what is drawn after it, the
# draw that drew its token in the step before, and the place of the last token.
POSITION, BLOCK, PLACE, SOURCE, LAST_PLACE = range(5)
NUM_COLUMNS = 5


class _Columns(NamedTuple):
    """What is kept of each member beside its numbers. A step keeps these lists: who comes or leaves changes copies."""

    members: list[Member]
    children: list[Child]
    tracks: list[Track]

    def copy(self) -> _Columns:
        return _Columns(list(self.members), list(self.children), list(self.tracks))


class Cohort:
    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._clear()

    def _clear(self) -> None:
        self._columns = _Columns([], [], [])
        self._tables: list[tuple[int, ...]] = []
        self._numbers = np.zeros((NUM_COLUMNS, 16), np.int64)
        self._index_of: dict[str, int] = {}  # by track
        self._asked: Counter[SamplerChoice] = Counter()  # how many members ask for it
        self._ends: Counter[frozenset[int]] = Counter()  # by end tokens, how many members have these
        self._end_token_ids: frozenset[int] = frozenset()
        self._loud: set[str] = set()  # tracks whose tokens somebody looks at as they come
        self._apart: frozenset[int] = frozenset()
        self._following: list[int] = []
        self._matchers: list[Matcher] = []
        self._fresh: set[str] = set()  # who came since the last step, by track
        self._changed: set[int] = set()
        self._is_kept = False  # the last step has these very columns

    def __len__(self) -> int:
        return len(self._index_of)

    # -- coming and going ------------------------------------------------------------------------------------

    def join(self, sequence: Sequence, child: Child, demands: Demands, source: int, *, is_quiet: bool) -> None:
        """A sequence of one track whose token was drawn as the draw `source` of the step under way."""
        track, index = sequence.tracks[0], len(self)
        columns = self._own_columns()
        output = sequence.output_token_ids
        columns.members.append(
            Member(track.key, sequence.request_id, sequence.child, demands, output, sequence.matcher)
        )
        columns.children.append(child)
        columns.tracks.append(track)
        self._tables.append(())
        if index == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        place = track.num_computed + 1 - len(track.prompt_token_ids)
        self._numbers[:, index] = track.num_computed, 0, place, source, demands.longest_output - 1
        self._index_of[track.key] = index
        self._fresh.add(track.key)
        self._changed.add(index)
        if not is_quiet:
            self._loud.add(track.key)
        self._count(demands, 1)

    def leave(self, sequence: Sequence) -> None:
        """Whether it is there or not; the last takes its place."""
        key = sequence.tracks[0].key
        index = self._index_of.pop(key, None)
        if index is None:
            return
        members, children, tracks = columns = self._own_columns()
        demands = members[index].demands
        last = len(members) - 1
        if index < last:
            members[index], children[index], tracks[index] = members[last], children[last], tracks[last]
            self._tables[index] = self._tables[last]
            self._numbers[:, index] = self._numbers[:, last]
            self._index_of[members[index].key] = index
            self._changed.add(index)
        for column in (*columns, self._tables):
            column.pop()
        self._changed.discard(last)
        self._fresh.discard(key)
        self._loud.discard(key)
        self._count(demands, -1)

    def dissolve(self) -> list[Sequence]:
        """Nobody is in it any more; returns who was."""
        sequences = [child.sequence for child in self._columns.children]
        self._clear()
        return sequences

    def those_at_their_end(self) -> list[Sequence]:
        """Whose token under way is the last one: they have nothing more to compute."""
        numbers = self._numbers[:, : len(self)]
        children = self._columns.children
        return [children[index].sequence for index in np.flatnonzero(numbers[PLACE] > numbers[LAST_PLACE]).tolist()]

    def last_order(self) -> Order:
        """Of the member that comes last; there must be one."""
        return max(child.sequence.order for child in self._columns.children)

    # -- a step ----------------------------------------------------------------------------------------------

    def most_new_blocks(self) -> int:
        """How many blocks a step takes at most."""
        positions = self._numbers[POSITION, : len(self)]
        return int(np.count_nonzero(positions % self._manager.block_size == 0)) + len(self._fresh)

    def go_on(self, copies: list[BlockCopy]) -> GoingOn:
        """Every member computes one position more. There must be room for the blocks of that.

        Copies of blocks that a member shared until now are added to `copies`.
        """
        count = len(self)
        members, children, tracks = self._columns
        position, block, place, source, last_place = self._numbers[:, :count]
        opening = np.flatnonzero(position % self._manager.block_size == 0).tolist()
        if opening or self._fresh:
            self._tables = list(self._tables)  # the step before keeps its own
        for index in {*opening, *(self._index_of[key] for key in self._fresh)}:
            self._open_block(index, copies)
        for track in tracks:
            track.num_computed += 1
        if not self._is_kept:
            self._apart = frozenset(self._index_of[key] for key in self._loud)
            self._following = [index for index, member in enumerate(members) if member.matcher is not None]
            self._matchers = [member.matcher for member in members if member.matcher is not None]
        onward = Onward(
            members,
            sorted(self._changed),
            asked={asked for asked, count in self._asked.items() if count},
            positions=position.copy(),
            places=place.copy(),
            blocks=block.copy(),
            tables=self._tables,
            sources=source.copy(),
            following=self._following,
            matchers=self._matchers,
        )
        ending = np.flatnonzero(place == last_place).tolist()
        position += 1
        place += 1
        source[:] = np.arange(count)
        self._fresh, self._changed, self._is_kept = set(), set(), True
        return GoingOn(onward, children, ending, self._end_token_ids, self._apart)

    def _open_block(self, index: int, copies: list[BlockCopy]) -> None:
        """Sees to it that a member alone holds the block of its next position, and publishes the one before it."""
        manager, track = self._manager, self._columns.tracks[index]
        position = track.num_computed
        table = manager.open_table(track.key, position) or manager.append_block(track.key, position)
        if table is None:
            copy = manager.copy_block(track.key, position)
            assert copy is not None, "there was room for it"
            copies.append(BlockCopy(*copy))
            table = manager.table(track.key)
        self._tables[index] = table
        self._numbers[BLOCK, index] = table[position // manager.block_size]
        if position % manager.block_size == 0:
            sequence = self._columns.children[index].sequence
            manager.publish(track.key, position, partial(sequence.tokens_between, track))

    # -- columns ---------------------------------------------------------------------------------------------

    def _own_columns(self) -> _Columns:
        """Columns that no step keeps."""
        if self._is_kept:
            self._columns, self._tables, self._is_kept = self._columns.copy(), list(self._tables), False
        return self._columns

    def _count(self, demands: Demands, change: int) -> None:
        """One more or one less who asks for this."""
        self._asked[demands.choice] += change
        self._ends[demands.end_token_ids] += change
        if self._ends[demands.end_token_ids] in (0, change):  # the last one left, or the first one came
            self._ends = +self._ends
            self._end_token_ids = frozenset().union(*self._ends)
