"""Who may read which leading blocks together: a pure function of block tables.

Tables form a tree of prefixes. A group at a node of depth d with m rows below it reads d blocks once instead of m times
and so saves (m - 1) * d block reads. Every row is in at most one group; this picks the groups that save most in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


def best_sharing(tables: Sequence[Table]) -> list[Sharing]:
    """The groups that save most block reads in all; rows that share nothing are in none."""
    order = sorted(range(len(tables)), key=lambda row: tables[row])  # rows with equal beginnings stand together
    depths = [common_blocks(tables[a], tables[b]) for a, b in pairwise(order)]
    return _best(order, depths, 0, len(order))


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


def _best(order: list[int], depths: list[int], start: int, end: int) -> list[Sharing]:
    """The best groups among the rows order[start:end]; depths[i] is what order[i] and order[i + 1] share."""
    pending = [(start, end)]
    chosen: list[Sharing] = []
    while pending:
        start, end = pending.pop()
        if end - start < 2:
            continue
        shallowest = min(depths[start : end - 1])
        cuts = [index + 1 for index in range(start, end - 1) if depths[index] == shallowest]
        parts = list(zip([start, *cuts], [*cuts, end], strict=True))
        if shallowest == 0:
            pending += parts
            continue
        whole = Sharing(shallowest, tuple(sorted(order[start:end])))
        split = [sharing for part in parts for sharing in _best(order, depths, *part)]
        chosen += split if sum(sharing.saved for sharing in split) > whole.saved else [whole]
    return chosen
