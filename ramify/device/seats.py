"""Who stands in which row of the device's buffers.

A track keeps its row while others come and go. The gap that one leaves is filled by one that comes, or else by the last
row, so rows are always 0, 1, 2, … and a step costs what changed.

    rows   0    1    2    3             b leaves                0    1    2
           a    b    c    d             d takes its row         a    d    c
"""

from __future__ import annotations

from collections.abc import Sequence


class Seats:
    def __init__(self) -> None:
        self._keys: list[str] = []
        self._row_of: dict[str, int] = {}
        self._last: tuple[list[str], list[int]] = ([], [])  # who was given a row last, and which

    def take(self, keys: Sequence[str]) -> list[int]:
        """Gives these keys a row each, and nobody else; returns their rows."""
        if keys == self._last[0]:
            return self._last[1]
        rows = self._take(keys)
        self._last = list(keys), rows
        return rows

    def _take(self, keys: Sequence[str]) -> list[int]:
        wanted = set(keys)
        leaving = [key for key in self._keys if key not in wanted]
        coming = [key for key in keys if key not in self._row_of]
        # By their names, so that a beam takes the row of one of its own search: most of its numbers are there already.
        leaving.sort()
        coming.sort()
        for key, successor in zip(leaving, coming, strict=False):
            self._sit(successor, self._row_of.pop(key))
        for key in leaving[len(coming) :]:
            row, last = self._row_of.pop(key), self._keys.pop()
            if last != key:
                self._sit(last, row)
        for key in coming[len(leaving) :]:
            self._keys.append(key)
            self._row_of[key] = len(self._keys) - 1
        return [self._row_of[key] for key in keys]

    def _sit(self, key: str, row: int) -> None:
        self._keys[row] = key
        self._row_of[key] = row
