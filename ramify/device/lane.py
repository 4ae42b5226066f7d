"""A lane: one model's part of a step, from its work to the logits after its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.device.graphs import (
    MOST_ROWS_WITH_PROMPTS,
    Graphs,
    Shape,
    padded,
    padded_with_prompts,
)
from ramify.device.last_draws import LastDraws
from ramify.device.layers import Layers
from ramify.device.reads import Int64s, Reads
from ramify.device.rows import Mirror, ModelRows, upload
from ramify.engine.plan import Onward, Row, Work
from ramify.engine.sharing import Table
from ramify.sampling.pipeline import Source

FORESEEN = 1 << 32  # and above: rows that were computed before the step, beyond those of any step


def most_rows(max_num_seqs: int, num_tracks: int, num_models: int) -> int:
    """Single rows of one model in a step, with padding; several tracks of a sequence may be of one model."""
    return padded(max_num_seqs * num_tracks // num_models)


class Moving(NamedTuple):
    """Chunks of beams whose choice only the device knows, and where it notes what they go on from."""

    chunks: Int64s
    parents: Tensor


class Lane:
    """With graphs, a step is padded to the size of one, and leaves the logits that are wanted in a buffer: what graphs
    read and write must stay where it is. A step of decodes alone is one graph, and all its rows leave their logits. One
    with prompts is two: of all rows, up to hidden states of those that are wanted, and of the logits after these."""

    def __init__(
        self,
        layers: Layers,
        max_rows: int,
        graphs: Graphs | None,
        *,
        number: int = 0,
        captures_prompts: bool = True,
        num_foreseen: int = 0,
    ) -> None:
        """number: among the lanes of one step, whose graphs know it by that. num_foreseen: how many rows that are
        computed before the step, by who drafts, may leave their logits for it."""
        self.layers = layers
        self._number = number
        self._graphs = graphs
        kept = self._num_kept = 0 if graphs is None else max_rows
        self._most_captured = MOST_ROWS_WITH_PROMPTS if kept and captures_prompts else 0  # rows of a step with prompts
        self._rows = ModelRows(max_rows, layers.pool.block_size, layers.device, most_captured=self._most_captured)
        self._buffer = torch.empty(kept + num_foreseen, layers.vocab_size, dtype=torch.float32, device=layers.device)
        self._foreseen = np.empty(0, np.int64)  # where those of each sequence begin among them
        self._wanted_rows = Mirror(1, kept, torch.int64, layers.device)
        self._wanted_hidden: Tensor | None = None  # (max_rows, hidden), once a step with prompts has come
        # Of the present step:
        self.has_prompts = False
        self.leaves_logits = False  # those that are wanted are in the buffer
        self.first_rows = np.empty(0, np.int64)  # of each member and chunk
        self._num_members = 0
        self._is_captured = False
        self._size = 0  # all rows, with padding
        self._num_behind = 0  # rows of padding behind those of prompts
        self._has_shared = False
        self._hidden: Tensor | None = None
        self._wanted = np.empty(0, np.int64)  # rows, ascending

    # -- on the host: the numbers of a step ------------------------------------------------------------------

    def reset(self) -> None:
        """Whoever comes, comes for the first time."""
        self._rows.reset()

    def begin(
        self,
        work: Work,
        last: LastDraws,
        onward: Onward | None = None,
        *,
        num_wanted: int | None = 0,
        moving: Moving | None = None,
    ) -> None:
        """Gives members and chunks their rows, and tells the layers who reads what.

        num_wanted: after so many rows logits will be wanted at most; None: after any number.
        """
        chunks = work.chunks
        self._num_members = 0 if onward is None else len(onward.members)
        counts = [len(chunk.token_ids) for chunk in chunks]
        total = self._num_members + sum(counts)
        self.has_prompts = sum(counts) > len(chunks)
        self.leaves_logits = self._graphs is not None and num_wanted is not None and num_wanted <= self._num_kept
        self._is_captured = self.leaves_logits and not (self.has_prompts and total > self._most_captured)
        self._size = total
        if self._is_captured:
            self._size = padded_with_prompts(total) if self.has_prompts else padded(total)
        self._num_behind = self._size - total if self.has_prompts else 0
        if not total:  # what the device was sent may still be in use
            self.first_rows = np.empty(0, np.int64)
            return
        self.first_rows = self._rows.place(chunks, self._size, last, onward, is_captured=self._is_captured)
        tables: Sequence[Table] = [chunk.block_table for chunk in chunks]
        num_rows, ends = np.array(counts, np.int64), np.array([chunk.start + 1 for chunk in chunks], np.int64)
        if onward is not None:
            tables = [*onward.tables, *tables] if chunks else onward.tables
            num_rows = np.concatenate([np.ones_like(onward.positions), num_rows])
            ends = np.concatenate([onward.positions + 1, ends])
        self._prepare(work, tables, num_rows, ends, moving)

    def go_on(self, work: Work, drawing_rows: Int64s, moving: Moving | None = None) -> None:
        """The decodes of the step before, one position on; their tokens were drawn in these rows."""
        tables = [chunk.block_table for chunk in work.chunks]
        positions = self._rows.go_on(tables, self.first_rows, drawing_rows)
        self._prepare(work, tables, np.ones_like(positions), positions + 1, moving)

    def move_to(self, work: Work, positions: Int64s, tokens: Int64s) -> None:
        """The decodes of the step before, elsewhere in their blocks, and with tokens that the host knows."""
        tables = [chunk.block_table for chunk in work.chunks]
        self._rows.move_to(tables, self.first_rows, positions, tokens)
        self._prepare(work, tables, np.ones_like(positions), positions + 1, None)

    def _prepare(
        self, work: Work, tables: Sequence[Table], num_rows: Int64s, ends: Int64s, moving: Moving | None
    ) -> None:
        block_size = self.layers.pool.block_size
        followed = None
        if moving is not None:
            rows = self.first_rows[self._num_members + moving.chunks]
            followed = self._rows.followed(rows, moving.parents)
        reads = Reads.of(
            self.first_rows,
            num_rows,
            ends,
            tables,
            self.layers.sharing.worthwhile(work.shared, num_rows, block_size),
            block_size=block_size,
            size=self._size,
            num_behind=self._num_behind,
            followed=followed,
        )
        self._has_shared = bool(reads.shared)
        self.layers.prepare(reads)

    def last_rows(self, rows: Int64s) -> Int64s:
        """Where the tokens that these rows compute were drawn in the step before, -1 if the host knows them."""
        return self._rows.sources(rows)

    def rows_of(self, rows: Sequence[Row]) -> Int64s:
        """Where rows of this model's chunks stand."""
        first_rows = self.first_rows[self._num_members :]
        if len(self._foreseen):  # chunk -1 is the first of these
            first_rows = np.concatenate([first_rows, FORESEEN + self._foreseen[::-1]])
        return first_rows[[row.chunk for row in rows]] + np.array([row.offset for row in rows], np.int64)

    # -- what is computed before the step ----------------------------------------------------------------------

    def foresee(self, first_rows: Int64s) -> None:
        """Says where the rows of each sequence begin among those that leave their logits before the step."""
        self._foreseen = first_rows

    @property
    def foreseen_logits(self) -> Tensor:
        """The buffer (num_foreseen, vocabulary) for them."""
        return self._buffer[self._num_kept :]

    def own(self, rows: Int64s) -> Int64s:
        """Those of them that the step itself computes."""
        return rows[rows < FORESEEN] if len(self._foreseen) else rows

    # -- on the device ---------------------------------------------------------------------------------------

    def compute(self, wanted: Int64s, drawn: Tensor, *, graphs: Graphs | None = None) -> None:
        """All rows; the logits after these, which ascend, can be asked for then.

        drawn (max_rows,): the tokens of the step before, for rows whose token the host does not know. graphs: where
        decodes are captured instead, if this runs beside what else is.
        """
        if not self._size:
            return
        if self.leaves_all and self._graphs is not None:
            shape = Shape("decodes", self._number, self._size, self._has_shared)
            (graphs or self._graphs).run(shape, lambda: self._forward_all(drawn))
            return
        self._wanted = wanted
        if self.leaves_logits and self._graphs is not None:
            self._leave_logits(self._graphs, drawn)
            return
        rows = None if len(wanted) == self._size else upload(wanted, self.layers.device)
        self._hidden = self.layers.forward(self._rows.batch(self._size, drawn), rows)

    def _leave_logits(self, graphs: Graphs, drawn: Tensor) -> None:
        """Of a step with prompts."""
        count = len(self._wanted)
        self._wanted_rows.host[0, :count] = self._wanted
        self._wanted_rows.host[0, count:] = 0
        self._wanted_rows.send()
        most = min(self._size, self._num_kept)
        if self._is_captured:
            shape = Shape("with prompts", self._number, self._size, self._has_shared)
            graphs.run(shape, lambda: self._forward_some(most, drawn), patiently=True)
        else:
            self._forward_some(count, drawn)
        if count:
            self.capture_logits(count)

    def capture_logits(self, count: int) -> None:
        """After the first wanted rows of a step with prompts."""
        if self._graphs is not None:
            size = padded(count)
            self._graphs.run(Shape("logits", self._number, size), lambda: self._logits_after(size))

    def logits(self, rows: Int64s) -> Tensor:
        """Float32 logits (len(rows), vocabulary) after these rows."""
        chosen = self.places_of(rows)
        if self.leaves_logits:
            return self._buffer[upload(chosen, self._buffer.device)]
        hidden = self._hidden
        assert hidden is not None, "compute comes first"
        if not is_in_order(chosen, len(hidden)):
            hidden = hidden[upload(chosen, hidden.device)]
        return self.layers.logits(hidden)

    @property
    def size(self) -> int:
        """All rows of the step, with padding."""
        return self._size

    @property
    def leaves_all(self) -> bool:
        """Whether every row leaves its logits, where it stands: decodes alone, by a graph."""
        return self._is_captured and not self.has_prompts

    def places_of(self, rows: Int64s) -> Int64s:
        """Where the logits after these rows are: among those that the step leaves, or that can be asked for."""
        places: Int64s = rows if self.leaves_all else np.searchsorted(self._wanted, rows)
        if len(self._foreseen):
            places = np.where(rows >= FORESEEN, rows - FORESEEN + self._num_kept, places)
        return places

    def left_logits(self, size: int | None = None) -> Tensor:
        """The buffer (size, vocabulary) in which a step leaves logits."""
        return self._buffer[:size]

    def sources(self, tracks: Sequence[Int64s]) -> list[Source]:
        """For each track of this model, given by the rows that its draws are from; one product serves all of them."""
        if self.leaves_logits:
            return [Source(self._buffer, self.places_of(rows).tolist()) for rows in tracks]
        distinct = tracks[0]
        if len(tracks) > 1 or (distinct[1:] <= distinct[:-1]).any():
            distinct = np.unique(np.concatenate(tracks))
        own = self.own(distinct)
        if len(own) == len(distinct):
            logits = self.logits(distinct)
        else:
            places = upload(distinct[len(own) :] - FORESEEN + self._num_kept, self._buffer.device)
            logits = torch.cat([*([self.logits(own)] if len(own) else []), self._buffer[places]])
        return [Source(logits, np.searchsorted(distinct, rows).tolist()) for rows in tracks]

    def _forward_all(self, drawn: Tensor) -> None:
        hidden = self.layers.forward(self._rows.batch(self._size, drawn))
        self.layers.logits(hidden, self.left_logits(self._size))

    def _forward_some(self, count: int, drawn: Tensor) -> None:
        """Hidden states of the first `count` wanted rows."""
        hidden = self.layers.forward(self._rows.batch(self._size, drawn), self._wanted_rows.device[0, :count])
        if self._wanted_hidden is None:
            self._wanted_hidden = hidden.new_zeros(self._num_kept, hidden.shape[1])
        self._wanted_hidden[:count] = hidden

    def _logits_after(self, count: int) -> None:
        assert self._wanted_hidden is not None, "hidden states come first"
        self.layers.logits(self._wanted_hidden[:count], self.left_logits(count))


def is_in_order(rows: Int64s, count: int) -> bool:
    """Whether these are the rows 0, 1, 2, … of so many."""
    return len(rows) == count and bool((rows == np.arange(count)).all())
