"""The numbers of a step's rows: kept on the host, mirrored on the device, sent when they have changed.

Decodes have rows that persist (seats.py), so that what a captured graph reads stays where it is, and a step in which
the same tracks just go on costs the host a few additions. Pieces of prompts come and go; their rows follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.device.last_draws import LastDraws
from ramify.device.layers import Batch
from ramify.device.reads import Followed, Int64s, slots_between
from ramify.device.seats import Seats
from ramify.device.staging import OF_PASSES, Staging
from ramify.engine.plan import GUESS, PENDING, Chunk, Draw, Onward
from ramify.engine.sharing import Table
from ramify.sampling import columns as column
from ramify.sampling.columns import numbers_of, places_in_sets, prefixes

# Columns of a model's rows. SOURCE: where the token was drawn in the step before, or drafted, -1 if the host knows it.
TOKEN, SOURCE, POSITION, SLOT = range(4)
NUM_COLUMNS = 4
PADDING_SLOT = -1


class Mirror:
    """Numbers (columns, max_rows) on the host, and the same on the device once they are sent."""

    def __init__(self, columns: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        held = torch.zeros(columns, max_rows, dtype=dtype)
        self.host: NDArray[Any] = held.numpy()
        # On a CPU both are one and the same memory.
        self.device = torch.zeros(columns, max_rows, dtype=dtype, device=device) if on_gpu else held
        self._staging = Staging(columns, max_rows, dtype=dtype, device=device, turns=OF_PASSES) if on_gpu else None

    def send(self, count: int | None = None) -> None:
        """All rows, or the first of one column."""
        if self._staging is not None:
            staged = self._staging.take()
            staged.numpy()[:, :count] = self.host[:, :count]
            self.device[:, :count].copy_(staged[:, :count], non_blocking=True)
            self._staging.sent()


class ModelRows:
    """The rows of one model: single tokens (decodes) in rows that persist, pieces of prompts behind them.

    Up to `most_captured` rows of a step with prompts are written where a graph finds them.
    """

    def __init__(self, max_rows: int, block_size: int, device: torch.device, *, most_captured: int = 0) -> None:
        self._block_size = block_size
        self._device = device
        self._numbers = Mirror(NUM_COLUMNS, max_rows, torch.int64, device)
        # The columns of a step with prompts, one after the other, each as long as the step has rows.
        self._captured = Mirror(1, NUM_COLUMNS * most_captured, torch.int64, device)
        self.reset()

    def reset(self) -> None:
        """No track has a row."""
        self._seats = Seats()
        self._num_decodes = 0  # of the last step, which stand in the first rows
        self._mixed: Tensor | None = None  # (NUM_COLUMNS, rows) of a step with prompts
        self._tables: list[Table] = []  # of the last step's decodes
        self._in_order = np.empty(0, np.int64)  # the rows of the last step's members: the same while they are as many

    def place(
        self,
        chunks: Sequence[Chunk],
        size: int,
        last: LastDraws,
        onward: Onward | None = None,
        *,
        is_captured: bool = False,
    ) -> Int64s:
        """Gives everyone rows and fills them; returns the first row of each, members before chunks.

        Members stand in the first rows, in their order. Rows beyond the real ones, up to `size`, are padding: what they
        compute nobody reads. A token that is pending was drawn in the row that the last draws name.
        """
        num_members = 0
        if onward is not None:
            num_members = len(onward.members)
            self._follow(onward, last.rows[onward.sources])
        if len(self._in_order) != num_members:
            self._in_order = np.arange(num_members)
        self._mixed, self._tables = None, []
        single = [index for index, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
        decodes = chunks if len(single) == len(chunks) else [chunks[index] for index in single]
        if onward is None:
            placed = np.array(self._seats.take([chunk.key for chunk in decodes]), dtype=np.int64)
            self._tables = [chunk.block_table for chunk in decodes]
        else:
            placed = np.arange(num_members, num_members + len(decodes))
        num_decodes, has_prompts = num_members + len(decodes), len(single) < len(chunks)
        self._num_decodes = num_decodes
        self._fill(decodes, placed, num_members, num_decodes if has_prompts else size, last)
        if not has_prompts:
            self._numbers.send()
        if not chunks:
            return self._in_order
        first_rows = np.empty(num_members + len(chunks), np.int64)
        first_rows[:num_members] = self._in_order
        own = first_rows[num_members:]
        own[single] = placed
        if has_prompts:
            prompts = [index for index, chunk in enumerate(chunks) if len(chunk.token_ids) > 1]
            counts = [len(chunks[index].token_ids) for index in prompts]
            own[prompts] = num_decodes + np.cumsum([0, *counts[:-1]])
            self._mix([chunks[index] for index in prompts], num_decodes, size, last, is_captured=is_captured)
        return first_rows

    def go_on(self, tables: list[Table], rows: Int64s, drawing_rows: Int64s) -> Int64s:
        """The decodes of the step before, one position on, each with the token that its drawing row drew there.

        What `place` comes to while nobody comes or goes; with what follows from it (`DeviceStep`), it saves the host
        0.5 ms of 2 for 256 rows. Returns their positions.
        """
        numbers, block_size = self._numbers.host, self._block_size
        positions: Int64s = numbers[POSITION, rows] + 1
        slots = numbers[SLOT, rows] + 1
        moved = set(np.flatnonzero(positions % block_size == 0).tolist())
        if tables != self._tables:
            known = self._tables
            moved.update(index for index, table in enumerate(tables) if table is not known[index])
            self._tables = tables
        if moved:  # into another block
            some = np.array(sorted(moved), np.int64)
            blocks = (positions[some] // block_size).tolist()
            first = np.array(
                [tables[index][block] for index, block in zip(some.tolist(), blocks, strict=True)], np.int64
            )
            slots[some] = first * block_size + positions[some] % block_size
        numbers[POSITION, rows] = positions
        numbers[SLOT, rows] = slots
        numbers[SOURCE, rows] = drawing_rows
        self._numbers.send()
        return positions

    def move_to(self, tables: Sequence[Table], rows: Int64s, positions: Int64s, tokens: Int64s) -> None:
        """The decodes of the step before, elsewhere in their blocks, and with tokens that the host knows."""
        numbers, block_size = self._numbers.host, self._block_size
        places = zip(tables, (positions // block_size).tolist(), strict=True)
        blocks = np.array([table[block] for table, block in places], np.int64)
        numbers[POSITION, rows] = positions
        numbers[SLOT, rows] = blocks * block_size + positions % block_size
        numbers[SOURCE, rows] = -1
        numbers[TOKEN, rows] = tokens
        self._numbers.send()

    def sources(self, rows: Int64s) -> Int64s:
        """Where the tokens of these rows were drawn in the step before, -1 if the host knows them."""
        is_single = rows < self._num_decodes
        sources: Int64s = np.where(is_single, self._numbers.host[SOURCE, np.where(is_single, rows, 0)], -1)
        return sources

    def followed(self, rows: Int64s, parents: Tensor) -> Followed:
        """These rows of the present step, each of which goes on from whom the device has noted where it drew."""
        numbers = self._numbers.host[:, rows]
        positions, blocks = numbers[POSITION], numbers[SLOT] // self._block_size
        is_inside = (positions % self._block_size > 0).astype(np.int64)
        return Followed(rows, numbers[SOURCE], blocks, positions // self._block_size, is_inside, parents)

    def batch(self, size: int, drawn: Tensor) -> Batch:
        """The rows of the step; `drawn` (max_rows,) are the tokens of the step before."""
        numbers = self._numbers.device[:, :size] if self._mixed is None else self._mixed
        source = numbers[SOURCE]
        token_ids = torch.where(source >= 0, drawn[source.clamp_min(0)], numbers[TOKEN])
        return Batch(token_ids, numbers[POSITION], numbers[SLOT])

    def _follow(self, onward: Onward, sources: Int64s) -> None:
        """Members, each with the token that was drawn in its source."""
        numbers, block_size, count = self._numbers.host, self._block_size, len(onward.members)
        numbers[POSITION, :count] = onward.positions
        numbers[SLOT, :count] = onward.blocks * block_size + onward.positions % block_size
        numbers[SOURCE, :count] = sources

    def _fill(self, chunks: Sequence[Chunk], rows: Int64s, first: int, size: int, last: LastDraws) -> None:
        """Decodes in these rows, which begin with `first`; behind them, padding."""
        numbers, block_size, end = self._numbers.host, self._block_size, first + len(rows)
        numbers[SLOT, end:size] = PADDING_SLOT
        numbers[[TOKEN, POSITION], end:size] = 0
        numbers[SOURCE, first:size] = -1
        if chunks:
            tokens = [chunk.token_ids[0] for chunk in chunks]
            if PENDING in tokens:
                drawn_in = last.by_track()
                pending = [index for index, token in enumerate(tokens) if token == PENDING]
                numbers[SOURCE, rows[pending]] = [drawn_in[chunks[index].key] for index in pending]
            numbers[TOKEN, rows] = tokens
            numbers[POSITION, rows] = [chunk.start for chunk in chunks]
            numbers[SLOT, rows] = [
                chunk.block_table[chunk.start // block_size] * block_size + chunk.start % block_size for chunk in chunks
            ]

    def _mix(
        self, prompts: Sequence[Chunk], num_decodes: int, size: int, last: LastDraws, *, is_captured: bool
    ) -> None:
        """The rows of decodes, of prompts (or of tokens drafted behind a last one), and padding, in one piece."""
        held = self._captured.host[0, : NUM_COLUMNS * size] if is_captured else np.empty(NUM_COLUMNS * size, np.int64)
        numbers = held.reshape(NUM_COLUMNS, size)
        end = num_decodes + sum(len(chunk.token_ids) for chunk in prompts)
        numbers[:, :num_decodes] = self._numbers.host[:, :num_decodes]
        numbers[SOURCE, num_decodes:] = -1
        numbers[SLOT, end:] = PADDING_SLOT
        numbers[[TOKEN, POSITION], end:] = 0
        first = num_decodes
        for chunk in prompts:
            rows = slice(first, first := first + len(chunk.token_ids))
            numbers[TOKEN, rows] = chunk.token_ids
            numbers[POSITION, rows] = np.arange(chunk.start, chunk.end)
            numbers[SLOT, rows] = slots_between(chunk.block_table, chunk.start, chunk.end, self._block_size)
        if len(last.guesses):
            tokens = numbers[TOKEN, num_decodes:end]
            [guesses] = np.nonzero(tokens <= GUESS)
            numbers[SOURCE, num_decodes + guesses] = last.guesses[GUESS - tokens[guesses]]
            tokens[guesses] = 0
        if is_captured:
            self._captured.send(held.size)
            self._mixed = self._captured.device[0, : held.size].view(NUM_COLUMNS, size)
        else:
            self._mixed = upload(numbers, self._device)


class DrawRows:
    """The rows of draws: their columns (sampling/columns.py) persist, and only what is new is written."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._integers = Mirror(column.NUM_INTEGERS, max_rows, torch.int64, device)
        self._floats = Mirror(column.NUM_FLOATS, max_rows, torch.float32, device)
        self._settled: list[tuple[int, int] | None] = [None] * max_rows  # whose numbers: request and child
        self._has_new_floats = True  # that were not sent

    def settle(
        self,
        draws: Sequence[Draw],
        rows: Int64s,
        size: int,
        *,
        slots: Int64s,
        sources: Sequence[Int64s] = (),
        last_rows: Int64s | None = None,
    ) -> None:
        """The rows of these draws hold their numbers; others, up to `size`, are padding, and draw the likeliest.

        slots: where the sampler keeps what their controls look at. sources: of two models, the rows of the teacher's
        and of the student's logits that each draw is from. last_rows: where the last token of each was drawn in the
        step before, if there are sets that look at that.
        """
        integers = self._integers.host
        self._settle(draws, rows.tolist())
        integers[column.POSITION, rows] = [draw.position for draw in draws]
        integers[column.SLOT, rows] = slots
        integers[[[column.SET], [column.DEPTH]], rows] = places_in_sets(draws)
        integers[[[column.PREFIX_HIGH], [column.PREFIX_LOW]], rows] = prefixes(draws)
        for name, source in zip((column.TEACHER_ROW, column.THETA_ROW), sources, strict=False):
            integers[name, rows] = source
        if last_rows is not None:
            integers[column.LAST_ROW, rows] = last_rows
        self._send(len(draws), size)

    def follow(
        self,
        onward: Onward,
        draws: Sequence[Draw],
        size: int,
        *,
        slots: Int64s,
        changed: Sequence[int],
        last_rows: Int64s | None = None,
    ) -> None:
        """The same for members, who draw in the first rows, and these draws behind them.

        changed: members whose rows may hold the numbers of others.
        """
        integers, count = self._integers.host, len(onward.members)
        self._settle([onward.draw(row) for row in changed], changed)
        end = count + len(draws)
        self._settle(draws, range(count, end))
        integers[column.POSITION, :count] = onward.places
        integers[column.POSITION, count:end] = [draw.position for draw in draws]
        integers[column.SLOT, :end] = slots
        integers[[column.SET, column.DEPTH], :count] = column.NO_SET
        integers[[column.SET, column.DEPTH], count:end] = places_in_sets(draws)
        integers[[column.PREFIX_HIGH, column.PREFIX_LOW], count:end] = prefixes(draws)
        if last_rows is not None:
            integers[column.LAST_ROW, count:end] = last_rows
        self._send(end, size)

    def _settle(self, draws: Sequence[Draw], rows: Sequence[int]) -> None:
        integers, floats = self._integers.host, self._floats.host
        for draw, row in zip(draws, rows, strict=True):
            # Which beam it is names no noise, and nothing else that is the beam's own stays from step to step.
            who = (draw.demands.number, 0 if draw.demands.is_beam_search else draw.child)
            if self._settled[row] != who:
                self._has_new_floats = True
                integers[:, row], floats[:, row] = numbers_of(draw)
                self._settled[row] = who

    def _send(self, count: int, size: int) -> None:
        """The first rows, and padding behind them."""
        integers = self._integers.host
        integers[column.SLOT, count:size] = column.NO_SLOT
        integers[[column.SET, column.DEPTH], count:size] = column.NO_SET
        integers[[column.TEACHER_ROW, column.THETA_ROW], count:size] = 0
        if any(self._settled[count:size]):
            self._has_new_floats = True
            self._floats.host[column.TEMPERATURE, count:size] = 0  # greedy: no rule acts on it
            self._settled[count:size] = [None] * (size - count)
        if self._has_new_floats:
            self._floats.send()
            self._has_new_floats = False
        self._integers.send()

    def go_on(self, rows: Int64s, last_rows: Int64s | None = None, *, by: Int64s | int = 1) -> None:
        """The same draws as in the step before, so many positions on."""
        self._integers.host[column.POSITION, rows] += by
        if last_rows is not None:
            self._integers.host[column.LAST_ROW, rows] = last_rows
        self._integers.send()

    def columns(self, size: int) -> tuple[Tensor, Tensor]:
        return self._integers.device[:, :size], self._floats.device[:, :size]


def upload(values: NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Numbers to the device, without waiting for what it is doing.

    Through pinned memory: a plain copy would wait until all that was launched before has run.
    """
    held = torch.from_numpy(values if isinstance(values, np.ndarray) else np.asarray(values, dtype=np.int64))
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held
