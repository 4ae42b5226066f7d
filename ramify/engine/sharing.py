"""Who may read which leading blocks together: a pure function of block tables.

Tables form a tree of prefixes. Sharing at a node of depth d with m rows below it reads d blocks once instead of m times
and so saves (m - 1) * d block reads. Every row shares in at most one place. From the leaves up, each node decides
whether the rows still loose below it, and those of sharings that would gain by it, share there instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Table = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
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
        dissolved = [sharing for sharing in self.sharings if len(sharing.rows) * self.depth > sharing.saved]
        rows = self.loose + [row for sharing in dissolved for row in sharing.rows]
        whole = Sharing(self.depth, tuple(sorted(rows)))
        if whole.saved > sum(sharing.saved for sharing in dissolved):
            self.sharings = [sharing for sharing in self.sharings if sharing not in dissolved] + [whole]
            self.loose = []


def best_sharing(tables: Sequence[Table]) -> list[Sharing]:
    """Sharings that save block reads; rows that share nothing are in none."""
    order = sorted(range(len(tables)), key=lambda row: tables[row])  # rows with equal beginnings stand together
    depths = [*(common_blocks(tables[a], tables[b]) for a, b in pairwise(order)), 0]
    path = [_Node(0)]  # from the root to the node that the next row hangs on
    for row, depth in zip(order, depths, strict=False):  # no rows: one depth too many
        below = _Node(len(tables[row]), [row])
        while path[-1].depth > depth:
            node = path.pop()
            node.take(below)
            node.close()
            below = node
        if path[-1].depth < depth:
            path.append(_Node(depth))
        path[-1].take(below)
    return path[0].sharings


def common_blocks(one: Table, other: Table) -> int:
    """How many leading blocks two tables share. Compares slices, which is quick however long they are."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
