"""The device's copy of rows' block tables: the host sends what differs from what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.device.reads import Int64s, Reads
from ramify.device.staging import Staging
from ramify.engine.sharing import Table, common_blocks

ENTRIES_AT_ONCE = 2**17  # of block tables, sent in one piece


class DeviceTables:
    """tables (max_rows, max_blocks) int32 on the device: the blocks of each single row, in order."""

    def __init__(self, tables: Tensor) -> None:
        self._tables = tables
        self._known: list[Table] = [()] * tables.shape[0]
        self._last_rows: Int64s = np.empty(0, np.int64)  # of the step before, in its order
        self._last_tables: Sequence[Table] = ()
        self._entries = Staging(ENTRIES_AT_ONCE, dtype=torch.int64, device=tables.device)
        self._blocks = Staging(ENTRIES_AT_ONCE, dtype=torch.int32, device=tables.device)

    def follow(self, reads: Reads) -> None:
        """Sends what differs: mostly nothing, now and then a block at the end."""
        moved = () if reads.followed is None else reads.followed.rows.tolist()
        for row in moved:  # the device writes these itself, and the host does not know them any more
            self._known[row] = ()
        if not moved and reads.first_rows is self._last_rows and reads.tables == self._last_tables:
            return  # the same tracks just go on
        # Known again only once it is sent: whoever breaks this off leaves rows that nothing is known of.
        self._last_rows = np.empty(0, np.int64)
        changed: list[tuple[int, Table]] = []
        entries: list[int] = []
        blocks: list[int] = []
        width, left_out = self._tables.shape[1], set(moved)
        for row, count, table in zip(reads.first_rows.tolist(), reads.num_rows.tolist(), reads.tables, strict=True):
            if count > 1 or row in left_out:
                continue
            known = self._known[row]
            if table is known or table == known:
                continue
            first = common_blocks(known, table)
            entries += range(row * width + first, row * width + len(table))
            blocks += table[first:]
            changed.append((row, table))
            self._known[row] = ()
        if entries:
            self._send(np.array(entries, np.int64), blocks)
        for row, table in changed:
            self._known[row] = table
        if not moved:
            self._last_rows, self._last_tables = reads.first_rows, reads.tables

    def _send(self, entries: Int64s, blocks: Sequence[int]) -> None:
        """Through pinned memory, so that the host does not wait for the device; a long list goes in pieces."""
        values = np.array(blocks, dtype=np.int32)
        for start in range(0, len(entries), ENTRIES_AT_ONCE):
            piece = slice(start, start + ENTRIES_AT_ONCE)
            self._tables.view(-1).index_copy_(
                0, self._sent(self._entries, entries[piece]), self._sent(self._blocks, values[piece])
            )

    def _sent(self, staging: Staging, numbers: NDArray[Any]) -> Tensor:
        staged = staging.take()[: len(numbers)]
        staged.numpy()[:] = numbers
        sent = staged.to(self._tables.device, non_blocking=True)
        staging.sent()
        return sent
