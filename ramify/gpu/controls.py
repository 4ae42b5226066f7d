"""What controls look at, kept on the device: a slot for each sequence that has penalties, bias or bans.

A sequence keeps its slot while it draws. The kernels count what they draw there, so the next step can be launched
before the host knows the token. A slot is written when a sequence takes it: its prompt, what it has drawn so far, and
what its request asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.device.reads import Int64s
from ramify.device.rows import upload
from ramify.engine.demands import LARGEST, MOST_BAD_WORDS, Demands
from ramify.engine.plan import Draw
from ramify.gpu.kernels import controls as kernels
from ramify.gpu.kernels.controls import ControlTables
from ramify.sampling.columns import NO_SLOT

_PENALTIES_OF_NONE = (1.0, 0.0, 0.0)
UNKNOWN = -1  # no position


class ControlSlots:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.tables = ControlTables.empty(num_slots, vocab_size, device)
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        """Nobody has a slot."""
        self._free = list(range(self._num_slots))[::-1]
        self._slot_of: dict[tuple[int, int], int] = {}  # by request and child, the longest held first
        # What each slot has counted reaches up to here.
        self._next_positions = np.full(self._num_slots, UNKNOWN, np.int64)

    def settle(self, draws: Sequence[Draw]) -> Int64s:
        """The slot of each of these draws, ready for it; at most as many draws as there are slots."""
        slots = np.full(len(draws), NO_SLOT, np.int64)
        asking = [index for index, draw in enumerate(draws) if draw.demands.is_controlled or draw.demands.remembers]
        if not asking:
            return slots
        names = [(draws[index].demands.number, draws[index].child) for index in asking]
        self._make_room(names)
        entering = []
        for index, name in zip(asking, names, strict=True):
            slot = self._slot_of.get(name)
            if slot is None:
                slot = self._slot_of[name] = self._free.pop()
                entering.append((slot, draws[index]))
            elif self._next_positions[slot] != draws[index].position:
                entering.append((slot, draws[index]))  # what its row drew last is not what it has
            slots[index] = slot
        if entering:
            self._write(entering)
        self._next_positions[slots[asking]] = [_next_position(draws[index]) for index in asking]
        return slots

    def go_on(self, slots: Int64s) -> None:
        """The draws of the step before, one position on."""
        self._next_positions[slots[slots >= 0]] += 1

    def _make_room(self, names: Sequence[tuple[int, int]]) -> None:
        wanted = set(names)
        lacking = len(wanted - self._slot_of.keys()) - len(self._free)
        if lacking > 0:
            leaving = [name for name in self._slot_of if name not in wanted][:lacking]
            self._free += [self._slot_of.pop(name) for name in leaving]

    def _write(self, entering: Sequence[tuple[int, Draw]]) -> None:
        assert all(len(draw.output) == draw.position for _, draw in entering), "what was drawn is not known here"
        tables, vocab_size = self.tables, self._vocab_size
        slots = np.array([slot for slot, _ in entering], np.int64)
        where = upload(slots, tables.flags.device)
        written = [_Slot(draw.demands, vocab_size) for _, draw in entering]
        self._put(tables.flags, where, np.array([each.flags for each in written], np.int32))
        self._put(tables.penalties, where, np.array([each.penalties for each in written], np.float32))
        self._put(tables.starts, where, np.stack([each.starts for each in written]).astype(np.int32))
        if any(len(each.ids) for each in written):
            self._put(tables.entry_ids, where, _stacked([each.ids for each in written], np.int32))
            self._put(tables.entry_amounts, where, _stacked([each.amounts for each in written], np.float32))
            self._put(tables.entry_ends, where, _stacked([each.ends for each in written], np.int32))
        if any(each.flags & kernels.ALLOWS_SOME.value for each in written):
            none = np.zeros(tables.allowed.shape[1], np.int32)
            self._put(tables.allowed, where, np.stack([_or(each.allowed, none) for each in written]))
        self._write_words(where, entering, written)
        self._write_seen(where, entering)

    def _write_words(self, where: Tensor, entering: Sequence[tuple[int, Draw]], written: Sequence[_Slot]) -> None:
        """Slots without words forget those of who had them before."""
        tables, width = self.tables, kernels.HISTORY
        count, num_words = len(entering), max(len(each.words) for each in written)
        lengths = np.zeros((count, MOST_BAD_WORDS), np.int32)
        if num_words:
            tokens = np.zeros((count, num_words, width), np.int32)
            entries = np.zeros((count, num_words), np.int32)
            history = np.zeros((count, width), np.int32)
            for row, ((_, draw), each) in enumerate(zip(entering, written, strict=True)):
                for number, (word, entry) in enumerate(each.words):
                    lengths[row, number] = len(word) - 1
                    tokens[row, number, : len(word) - 1] = word[-2::-1]
                    entries[row, number] = entry
                for back, token in enumerate(reversed(draw.output[-width:])):
                    history[row, (draw.position - 1 - back) % width] = token
            self._put(tables.word_tokens, where, tokens)
            self._put(tables.word_entries, where, entries)
            self._put(tables.history, where, history)
        self._put(tables.word_lengths, where, lengths)

    def _write_seen(self, where: Tensor, entering: Sequence[tuple[int, Draw]]) -> None:
        """What prompts and outputs have, of those who ask."""
        marks = []
        for slot, draw in entering:
            demands = draw.demands
            first = slot * self._vocab_size
            if demands.counts_prompt:
                marks += [(first + ids, 1 << track) for track, ids in enumerate(demands.distinct_prompts)]
            if (demands.counts_prompt or demands.counts_output) and draw.output:
                marks.append((first + np.asarray(draw.output, np.int64), kernels.SEEN_ONCE.value))
        seen = self.tables.seen
        seen.index_fill_(0, where, 0)
        if marks:
            cells = upload(np.concatenate([cells for cells, _ in marks]), seen.device)
            amounts = np.concatenate([np.full(len(cells), amount, np.int32) for cells, amount in marks])
            seen.view(-1).index_add_(0, cells, upload(amounts, seen.device))

    def _put(self, table: Tensor, where: Tensor, rows: NDArray[Any]) -> None:
        """Into the first columns of these slots."""
        target = table[:, : rows.shape[1]] if rows.ndim > 1 else table
        target.index_copy_(0, where, upload(rows, table.device))


def _next_position(draw: Draw) -> int:
    """Where a slot is good for after this draw. A search takes a candidate, and not what its row draws and counts."""
    return UNKNOWN if draw.demands.is_search else draw.position + 1


class _Slot:
    """What one request asks for, as its slot holds it."""

    def __init__(self, demands: Demands, vocab_size: int) -> None:
        params = demands.params
        self.flags = 0
        self.penalties = _PENALTIES_OF_NONE
        if demands.counts_prompt or demands.counts_output:
            self.flags |= kernels.PENALISES.value
            repetition = min(max(params.repetition_penalty, 1 / LARGEST), LARGEST)
            self.penalties = (repetition, params.frequency_penalty, params.presence_penalty)
        self.allowed: NDArray[np.int32] | None = None
        if params.allowed_token_ids or params.structured_outputs:
            self.flags |= kernels.ALLOWS_SOME.value
        if params.allowed_token_ids:
            self.allowed = _bits(params.allowed_token_ids, vocab_size)
        entries = [
            (token, min(max(amount, -LARGEST), LARGEST), kernels.ALWAYS)
            for token, amount in (params.logit_bias or {}).items()
        ]
        if params.min_tokens:
            entries += [(token, -np.inf, params.min_tokens) for token in demands.end_token_ids]
        entries += [(word[-1], -np.inf, kernels.ALWAYS if len(word) == 1 else 0) for word in demands.bad_words]
        order = sorted(range(len(entries)), key=lambda index: entries[index][0])
        self.ids = np.array([entries[index][0] for index in order], np.int64)
        self.amounts = np.array([entries[index][1] for index in order], np.float32)
        self.ends = np.array([entries[index][2] for index in order], np.int64)
        place = {index: rank for rank, index in enumerate(order)}
        first_word = len(entries) - len(demands.bad_words)
        # Words of several tokens, each with the entry that bans its last one.
        self.words = [
            (word, place[first_word + number]) for number, word in enumerate(demands.bad_words) if len(word) > 1
        ]
        edges = np.arange(-(-vocab_size // kernels.CHUNK) + 1) * kernels.CHUNK
        self.starts = np.searchsorted(self.ids, edges)


def _bits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _stacked(rows: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Rows of different lengths, padded with zeros."""
    stacked = np.zeros((len(rows), max(map(len, rows))), dtype)
    for target, row in zip(stacked, rows, strict=True):
        target[: len(row)] = row
    return stacked


def _or(value: NDArray[np.int32] | None, otherwise: NDArray[np.int32]) -> NDArray[np.int32]:
    return otherwise if value is None else value
