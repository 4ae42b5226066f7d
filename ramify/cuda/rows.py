"""Which sequence stands in which row of the device's buffers.

A sequence keeps its row while others come and go; the gap that one leaves is filled by the last row, so rows are always
0, 1, 2, … and a step costs what changed. The host keeps a mirror of every buffer and uploads only what differs.

    rows   0    1    2    3             b leaves                0    1    2
           a    b    c    d             d takes its row         a    d    c
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kv.sharing import Table, common_blocks
from ramify.plan import Chunk, Rules

# Columns of the integer mirror, one row of numbers each.
# PARTNER: of two models, the row that the same sequence has in the other's lane.
TOKEN, SOURCE, POSITION, SLOT, SEED_LOW, SEED_HIGH, CHILD, OUTPUT_POSITION, TOP_K, PARTNER = range(10)
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_INTEGERS, NUM_FLOATS = 10, 3
PADDING_SLOT = -1
ENTRIES_AT_ONCE = 2**17  # of block tables, sent in one piece


class DeviceRows:
    """Block tables and per-row numbers of up to max_rows sequences, on the device and mirrored on the host."""

    def __init__(self, tables: Tensor) -> None:
        """tables (max_rows, max_blocks) int32 on the device: the blocks of each row, in order."""
        self.tables = tables
        self.device = device = tables.device
        max_rows = tables.shape[0]
        self.integer_mirror: NDArray[np.int64] = np.zeros((NUM_INTEGERS, max_rows), np.int64)
        self.float_mirror: NDArray[np.float32] = np.zeros((NUM_FLOATS, max_rows), np.float32)
        self.integers = torch.zeros(NUM_INTEGERS, max_rows, dtype=torch.int64, device=device)
        self.floats = torch.zeros(NUM_FLOATS, max_rows, dtype=torch.float32, device=device)
        # Two of each: the copy of the step before may not have been made yet when the next is written.
        pinned = device.type == "cuda"
        self._staged = [
            (
                torch.empty(NUM_INTEGERS, max_rows, dtype=torch.int64, pin_memory=pinned),
                torch.empty(NUM_FLOATS, max_rows, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self._staged_tables = [
            (
                torch.empty(ENTRIES_AT_ONCE, dtype=torch.int64, pin_memory=pinned),
                torch.empty(ENTRIES_AT_ONCE, dtype=torch.int32, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self.rules: list[Rules | None] = [None] * max_rows  # whose sampling numbers stand in the mirrors
        self._known: list[Table] = [()] * max_rows  # the table that the device has for each row
        self._keys: list[str] = []
        self._row_of: dict[str, int] = {}

    def place(self, chunks: Sequence[Chunk]) -> list[int]:
        """Gives every chunk's track a row for this step, and nobody else; returns the rows."""
        wanted = {chunk.key for chunk in chunks}
        for key in [key for key in self._keys if key not in wanted]:
            self._leave(key)
        for chunk in chunks:
            if chunk.key not in self._row_of:
                self._row_of[chunk.key] = row = len(self._keys)
                self._keys.append(chunk.key)
                self.rules[row] = None
        rows = [self._row_of[chunk.key] for chunk in chunks]
        self.follow_tables(chunks, rows)
        return rows

    def upload(self) -> None:
        """The numbers of all rows, as they stand in the mirrors."""
        integers, floats = self._staged[0]
        self._staged.reverse()
        integers.copy_(torch.from_numpy(self.integer_mirror))
        floats.copy_(torch.from_numpy(self.float_mirror))
        self.integers.copy_(integers, non_blocking=True)
        self.floats.copy_(floats, non_blocking=True)

    def _leave(self, key: str) -> None:
        row = self._row_of.pop(key)
        last = self._keys.pop()
        if last == key:
            return
        end = len(self._keys)
        self._keys[row] = last
        self._row_of[last] = row
        self.integer_mirror[:, row] = self.integer_mirror[:, end]
        self.float_mirror[:, row] = self.float_mirror[:, end]
        self.rules[row] = self.rules[end]

    def follow_tables(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> list[int]:
        """Sends what differs from what the device has: mostly nothing, now and then a block at the end.

        Returns the places of the chunks whose table differed.
        """
        changed: list[int] = []
        places: list[NDArray[np.int64]] = []
        values: list[int] = []
        width = self.tables.shape[1]
        for place, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            table, known = chunk.block_table, self._known[row]
            if table is known or table == known:
                continue
            changed.append(place)
            first = common_blocks(known, table)
            places.append(np.arange(row * width + first, row * width + len(table)))
            values += table[first:]
            self._known[row] = table
        if places:
            self._send_tables(np.concatenate(places), np.array(values, dtype=np.int32))
        return changed

    def _send_tables(self, places: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """Through pinned memory, so that the host does not wait for the device; a long list goes in pieces."""
        for start in range(0, len(places), ENTRIES_AT_ONCE):
            where, sent = self._staged_tables[0]
            self._staged_tables.reverse()
            if start >= 2 * ENTRIES_AT_ONCE and self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # both are on their way
            count = min(ENTRIES_AT_ONCE, len(places) - start)
            where.numpy()[:count] = places[start : start + count]
            sent.numpy()[:count] = values[start : start + count]
            self.tables.view(-1).index_copy_(
                0, where[:count].to(self.device, non_blocking=True), sent[:count].to(self.device, non_blocking=True)
            )
