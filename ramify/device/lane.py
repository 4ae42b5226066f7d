"""A lane: one model's part of a step, from its work to the logits after its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.device.graphs import Graphs, padded
from ramify.device.last_draws import LastDraws
from ramify.device.layers import Layers
from ramify.device.reads import Int64s, Reads
from ramify.device.rows import ModelRows, upload
from ramify.engine.plan import Onward, Row, Work
from ramify.engine.sharing import Table
from ramify.sampling.pipeline import Source


def most_rows(max_num_seqs: int, num_tracks: int, num_models: int) -> int:
    """Single rows of one model in a step, with padding; several tracks of a sequence may be of one model."""
    return padded(max_num_seqs * num_tracks // num_models)


class Lane:
    """With graphs, a step of decodes alone is padded to the size of one, and leaves the logits of all its rows in a
    buffer: what graphs read and write must stay where it is."""

    def __init__(self, layers: Layers, max_rows: int, graphs: Graphs | None) -> None:
        self.layers = layers
        self._graphs = graphs
        self._rows = ModelRows(max_rows, layers.pool.block_size, layers.device)
        self._buffer = torch.empty(
            0 if graphs is None else max_rows, layers.vocab_size, dtype=torch.float32, device=layers.device
        )
        # Of the present step:
        self.is_captured = False  # decodes alone, by a graph
        self.first_rows = np.empty(0, np.int64)  # of each member and chunk
        self._num_members = 0
        self.size = 0  # decodes, with their padding
        self._num_rows = 0  # all rows
        self._shape = (0, False)
        self._hidden: Tensor | None = None
        self._wanted: Int64s | None = None  # the rows that the hidden states are of; None: all

    # -- on the host: the numbers of a step ------------------------------------------------------------------

    def reset(self) -> None:
        """Whoever comes, comes for the first time."""
        self._rows.reset()

    def begin(self, work: Work, last: LastDraws, onward: Onward | None = None) -> None:
        """Gives members and chunks their rows, and tells the layers who reads what."""
        chunks = work.chunks
        self._num_members = 0 if onward is None else len(onward.members)
        counts = [len(chunk.token_ids) for chunk in chunks]
        num_singles = counts.count(1)
        self.is_captured = self._graphs is not None and num_singles == len(chunks)
        num_decodes = self._num_members + num_singles
        self.size = padded(num_decodes) if self.is_captured else num_decodes
        self._num_rows = self.size + sum(counts) - num_singles
        self.first_rows = self._rows.place(chunks, self.size, last, onward)
        if not self._num_rows:
            return
        tables: Sequence[Table] = [chunk.block_table for chunk in chunks]
        num_rows, ends = np.array(counts, np.int64), np.array([chunk.start + 1 for chunk in chunks], np.int64)
        if onward is not None:
            tables = [*onward.tables, *tables] if chunks else onward.tables
            num_rows = np.concatenate([np.ones_like(onward.positions), num_rows])
            ends = np.concatenate([onward.positions + 1, ends])
        self._prepare(work, tables, num_rows, ends)

    def go_on(self, work: Work, drawing_rows: Int64s) -> None:
        """The decodes of the step before, one position on; their tokens were drawn in these rows."""
        tables = [chunk.block_table for chunk in work.chunks]
        positions = self._rows.go_on(tables, self.first_rows, drawing_rows)
        self._prepare(work, tables, np.ones_like(positions), positions + 1)

    def _prepare(self, work: Work, tables: Sequence[Table], num_rows: Int64s, ends: Int64s) -> None:
        block_size = self.layers.pool.block_size
        reads = Reads.of(
            self.first_rows,
            num_rows,
            ends,
            tables,
            self.layers.sharing.worthwhile(work.shared, num_rows, block_size),
            block_size=block_size,
            size=self._num_rows,
        )
        self._shape = (self.size, bool(reads.shared))
        self.layers.prepare(reads)

    def rows_of(self, rows: Sequence[Row]) -> Int64s:
        """Where rows of this model's chunks stand."""
        first_rows = self.first_rows[self._num_members :]
        return first_rows[[row.chunk for row in rows]] + np.array([row.offset for row in rows], np.int64)

    # -- on the device ---------------------------------------------------------------------------------------

    def compute(self, wanted: Int64s, drawn: Tensor) -> None:
        """All rows; the logits after these, which ascend, can be asked for then.

        drawn (max_rows,): the tokens of the step before, for rows whose token the host does not know.
        """
        if not self._num_rows:
            return
        if self.is_captured and self._graphs is not None:
            self._graphs.run((self, *self._shape), lambda: self._forward_all(drawn))
            return
        self._wanted = None if len(wanted) == self._num_rows else wanted
        batch = self._rows.batch(self.size, drawn)
        self._hidden = self.layers.forward(batch, None if self._wanted is None else wanted.tolist())

    def logits(self, rows: Int64s) -> Tensor:
        """Float32 logits (len(rows), vocabulary) after these rows."""
        if self.is_captured:
            return self._buffer[upload(rows, self._buffer.device)]
        hidden = self._hidden
        assert hidden is not None, "compute comes first"
        chosen = rows if self._wanted is None else np.searchsorted(self._wanted, rows)
        if not is_in_order(chosen, len(hidden)):
            hidden = hidden[upload(chosen, hidden.device)]
        return self.layers.logits(hidden)

    def all_logits(self) -> Tensor:
        """Of a captured step: (size, vocabulary), row by row."""
        return self._buffer[: self.size]

    def sources(self, tracks: Sequence[Int64s]) -> list[Source]:
        """For each track of this model, given by the rows that its draws are from; one product serves all of them."""
        if self.is_captured:
            return [Source(self.all_logits(), rows.tolist()) for rows in tracks]
        distinct = tracks[0]
        if len(tracks) > 1 or (distinct[1:] <= distinct[:-1]).any():
            distinct = np.unique(np.concatenate(tracks))
        logits = self.logits(distinct)
        return [Source(logits, np.searchsorted(distinct, rows).tolist()) for rows in tracks]

    def _forward_all(self, drawn: Tensor) -> None:
        hidden = self.layers.forward(self._rows.batch(self.size, drawn))
        self.layers.logits(hidden, self.all_logits())


def is_in_order(rows: Int64s, count: int) -> bool:
    """Whether these are the rows 0, 1, 2, … of so many."""
    return len(rows) == count and bool((rows == np.arange(count)).all())
