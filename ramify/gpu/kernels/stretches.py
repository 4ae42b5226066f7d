"""Where the positions of rows are cut into stretches, each of which gives a row one part.

EvenCuts       at fixed distances from where a row's shared part and its own part start: as few as keep the chip busy
PositionCuts   at the same positions in every row, so that a row has the same parts whether it shares its beginning
               or reads it alone, whoever stands beside it:

position   0    256   512          4096        4608        16384            17408
           |-----|-----| ... 16 ... |-----------| ... 24 ... |----------------| ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from ramify.device.reads import Int64s

OWN_SPLITS = (64, 2048)  # positions of a row's own part that one item walks: where rows are few, where they are many
MOST_OWN_PARTS = 16  # a longer row is cut into longer stretches: who merges its parts takes one after the other
PREFIX_SPLIT = 1024  # positions of a shared part that one item walks, where nothing is known of its kernel
MOST_SHARED_PARTS = 16
LONGEST_WALK = 48  # tiles of a shared part that one item walks, if it need not have more parts than the most
# In the time that a tile takes (1.2 us on an H200): to begin and end a walk, and to merge one part more.
WALK_COST, PART_COST = 5.5, 0.75
# How long stretches are up to which position. Long rows get longer ones: parts take memory and are merged one by one.
LENGTHS = ((256, 4_096), (512, 16_384), (1_024, 2**40))


class Stretches(NamedTuple):
    """Of several rows, row by row."""

    counts: Int64s  # (rows,)
    owners: Int64s  # the row of each stretch
    indices: Int64s  # among those of its row
    starts: Int64s
    ends: Int64s


class Cuts(Protocol):
    def own(self, starts: Int64s, ends: Int64s) -> Stretches:
        """The positions of each row behind what it shares."""

    def shared(self, ends: Int64s, sharers: Int64s) -> Stretches:
        """The positions of each shared part, from 0, which so many rows share."""


class PrefixTiles(NamedTuple):
    """How the kernel of shared parts walks: tiles of queries of one key-value head, over tiles of positions."""

    queries: int
    positions: int
    programs: int  # that run at the same time
    kv_heads: int
    queries_per_row: int

    @lru_cache(maxsize=4096)  # noqa: B019 (of numbers alone; steps ask for the same ones again and again)
    def split(self, end: int, sharers: int, rows: int) -> int:
        """How many positions of a shared part an item walks, so that all items take the least time if all rows of the
        step were in groups like this one: where a row is cut does not depend on what the others are."""
        tiles = -(-sharers * self.queries_per_row // self.queries) * self.kv_heads * max(rows // max(sharers, 1), 1)
        tiles_of_positions = -(-end // self.positions)

        def cost(parts: int) -> float:
            walked = -(-tiles_of_positions // parts)
            if walked > LONGEST_WALK and parts < MOST_SHARED_PARTS:
                return inf
            return -(-tiles * parts // self.programs) * (walked + WALK_COST) + PART_COST * parts

        parts = min(range(1, MOST_SHARED_PARTS + 1), key=cost)
        return max(-(-tiles_of_positions // parts), 1) * self.positions


@dataclass(frozen=True, slots=True)
class EvenCuts:
    """A row is cut every `own_split` positions, or twice that, four times that, ..., until it has no more than
    MOST_OWN_PARTS parts of its own; a shared part every `prefix_split`, or as suits its `tiles` in a step of so many
    `rows`."""

    own_split: int
    prefix_split: int = PREFIX_SPLIT
    tiles: PrefixTiles | None = None
    rows: int = 0

    @classmethod
    def of(cls, rows: int, kv_heads: int, tiles: PrefixTiles | None = None) -> EvenCuts:
        """As many positions as there are rows times key-value heads: 256 of them, cut once or twice, keep an H200 busy.

        A stretch is walked tile by tile and waits for memory at each; where rows are many enough for the chip anyway,
        cuts only cost: a part is written, counted, read again and merged.
        """
        shortest, longest = OWN_SPLITS
        split = shortest
        while split < min(rows * kv_heads, longest):
            split *= 2
        return cls(split, tiles=tiles, rows=rows)

    def own(self, starts: Int64s, ends: Int64s) -> Stretches:
        splits = np.full_like(ends, self.own_split)
        while (too_many := ends - starts > MOST_OWN_PARTS * splits).any():
            splits[too_many] *= 2
        return _even(starts, ends, splits)

    def shared(self, ends: Int64s, sharers: Int64s) -> Stretches:
        splits = np.full_like(ends, self.prefix_split)
        if self.tiles is not None:
            pairs = zip(ends.tolist(), sharers.tolist(), strict=True)
            splits = np.array([self.tiles.split(end, count, self.rows) for end, count in pairs], np.int64)
        return _even(np.zeros_like(ends), ends, splits)

    @staticmethod
    def most_parts(max_model_len: int) -> int:
        """Of one row, with any number of rows beside it, where shared parts are cut as suits their tiles."""
        return min(MOST_OWN_PARTS, -(-max_model_len // OWN_SPLITS[0])) + MOST_SHARED_PARTS


@dataclass(frozen=True)
class PositionCuts:
    """For rows of up to `max_model_len` positions; lengths: of stretches, and up to which position."""

    max_model_len: int
    lengths: tuple[tuple[int, int], ...] = LENGTHS

    @cached_property
    def positions(self) -> Int64s:
        """Where stretches start, ascending, the last one at or past the end of any row."""
        found, at = [0], 0
        for length, until in self.lengths:
            while at < min(until, self.max_model_len):
                at += length
                found.append(at)
        return np.array(found, np.int64)

    def own(self, starts: Int64s, ends: Int64s) -> Stretches:
        """Own parts start at a cut (`largest_prefix`), or stretches would not be the same as alone."""
        first = np.searchsorted(self.positions, starts)
        if (self.positions[first] != starts).any():
            raise ValueError("a shared part does not end at a cut")
        counts = np.searchsorted(self.positions, ends) - first
        owners, indices = _expand(counts)
        at = first[owners] + indices
        return Stretches(counts, owners, indices, self.positions[at], np.minimum(self.positions[at + 1], ends[owners]))

    def shared(self, ends: Int64s, sharers: Int64s) -> Stretches:  # noqa: ARG002 (by position alone)
        return self.own(np.zeros_like(ends), ends)

    @property
    def most_parts(self) -> int:
        """Of one row."""
        return int(np.searchsorted(self.positions, self.max_model_len))

    def largest_prefix(self, blocks: int, block_size: int) -> int:
        """The most leading blocks, up to so many, that end at a cut."""
        cuts = self.positions[self.positions <= blocks * block_size]
        return int(cuts[cuts % block_size == 0][-1]) // block_size


def _even(starts: Int64s, ends: Int64s, splits: Int64s) -> Stretches:
    counts = -((starts - ends) // splits)
    owners, indices = _expand(counts)
    split = splits[owners]
    start = starts[owners] + indices * split
    return Stretches(counts, owners, indices, start, np.minimum(start + split, ends[owners]))


def _expand(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Counts 2, 0, 3 become owners 0 0 2 2 2 and indices 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - before[owner]
