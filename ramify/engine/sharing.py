"""Who may read which leading blocks together: a pure function of block tables.

Tables form a tree of prefixes. Sharing at a node of depth d with m rows below it reads d blocks once instead of m times
and so saves (m - 1) * d block reads. Every row shares in at most one place. From the leaves up, each node decides
whether the rows still loose below it, and those of sharings that would gain by it, share there instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

Table = tuple[int, ...]
LAST_FEW = 4  # blocks in which siblings differ


class Sharing(NamedTuple):
    """Rows (indices into the tables given) that hold the same first `num_blocks` blocks."""

    num_blocks: int
    rows: tuple[int, ...]

    @property
    def saved(self) -> int:
        return (len(self.rows) - 1) * self.num_blocks


@dataclass(slots=True)
class _Node:
    """The rows below a prefix of `depth` blocks: those that share already, and those still loose."""

    depth: int
    loose: list[int] = field(default_factory=list)
    sharings: list[Sharing] = field(default_factory=list)

    def take(self, other: _Node) -> None:
        self.loose += other.loose
        self.sharings += other.sharings

    def close(self) -> None:
        """Everything below is known: one sharing here, if that saves more than what is there already."""
        rows, saved_below, kept = list(self.loose), 0, []
        for sharing in self.sharings:
            if len(sharing.rows) * self.depth > sharing.saved:
                rows += sharing.rows
                saved_below += sharing.saved
            else:
                kept.append(sharing)
        if (len(rows) - 1) * self.depth > saved_below:
            self.loose = []
            self.sharings = [*kept, Sharing(self.depth, tuple(sorted(rows)))]


def best_sharing(tables: Sequence[Table]) -> list[Sharing]:
    """Sharings that save block reads; rows that share nothing are in none."""
    order = sorted(range(len(tables)), key=tables.__getitem__)  # rows with equal beginnings stand together
    depths = [*(common_blocks(tables[a], tables[b]) for a, b in pairwise(order)), 0]
    path = [_Node(0)]  # from the root to the node that the next row hangs on
    for row, depth in zip(order, depths, strict=False):  # no rows: one depth too many
        if path[-1].depth < depth:
            path.append(_Node(depth))
        path[-1].loose.append(row)
        while path[-1].depth > depth:
            node = path.pop()
            node.close()
            if path[-1].depth < depth:
                path.append(_Node(depth))
            path[-1].take(node)
    return path[0].sharings


def common_blocks(one: Table, other: Table) -> int:
    """How many leading blocks two tables share. Compares slices, which is quick however long they are.

    Strangers differ from the first block on, siblings in the last few: both are looked for first.
    """
    low, longest = 0, min(len(one), len(other))
    high = longest
    if high == 0 or one[0] != other[0]:
        return 0
    while high > longest - LAST_FEW and one[high - 1] != other[high - 1]:
        high -= 1
    if one[:high] == other[:high]:
        return high
    high -= 1
    stride = 0  # from the end, where the middle is farther away
    while low < high:
        middle = max((low + high + 1) // 2, high - stride)
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
        stride = 2 * stride + 1
    return low
