"""Searches whose beams are chosen on the device: which rows they have, and where their sums are kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ramify.device.reads import Int64s
from ramify.device.staging import Staging
from ramify.engine.plan import Draw, Selection
from ramify.gpu.kernels import selection as fields
from ramify.gpu.kernels.selection import empty_orders, empty_totals, select_beams
from ramify.gpu.results import Drawn

_ONE = fields.FIELDS.value


class Searches:
    """The host's list is sent when it has changed. What beams add up to stays on the device, a slot for each search."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._list = torch.zeros(1 + max_rows, _ONE, dtype=torch.int64, device=device)
        self._staging = Staging(1 + max_rows, _ONE, dtype=torch.int64, device=device)
        self._totals = empty_totals(max_rows, device)
        self._orders = empty_orders(max_rows, device)
        # By the rows of draws, the lane's rows that they go on from.
        self.parents = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._slot_of: dict[int, int] = {}  # by the requests' numbers
        self._sent: tuple[list[tuple[int, range]], bytes, bytes] | None = (
            None  # searches, and rows, if nothing else was told
        )

    def write(self, selections: Sequence[Selection], draws: Sequence[Draw], rows: Int64s, lane_rows: Int64s) -> None:
        """From now on `choose` chooses for these; rows and lane_rows are those of the plan's own draws."""
        listed = ([each[:2] for each in selections], rows.tobytes(), lane_rows.tobytes())
        goes_on = all(selection.totals is None for selection in selections)
        if goes_on and listed == self._sent:  # the same beams in the same rows
            return
        self._sent = None
        self._give_slots(selections)
        told = np.zeros((1 + len(selections), _ONE), np.int64)
        told[0, 0] = len(selections)
        for entry, selection in zip(told[1:], selections, strict=True):
            demands, own = draws[selection.draws[0]].demands, slice(selection.draws.start, selection.draws.stop)
            width, ends = len(selection.draws), sorted(demands.end_token_ids)
            is_told = selection.totals is not None
            entry[: fields.ENDS.value] = (
                width,
                demands.num_candidates,
                self._slot_of[selection.number],
                is_told,
                len(ends),
            )
            for first, numbers in (
                (fields.ENDS, ends),
                (fields.ROWS, rows[own]),
                (fields.LANE_ROWS, lane_rows[own]),
                (fields.ORDER, selection.order),
            ):
                entry[first.value : first.value + len(numbers)] = numbers
            if selection.totals is not None:
                entry.view(np.float64)[fields.TOTALS.value : fields.TOTALS.value + width] = selection.totals
        staged = self._staging.take()
        staged.numpy()[: len(told)] = told
        self._list[: len(told)].copy_(staged[: len(told)], non_blocking=True)
        self._staging.sent()
        self._sent = listed if goes_on else None

    def choose(self, drawn: Drawn) -> None:
        """From the candidates of R rows; into their tokens, logprobs, and what is told of them."""
        token_ids, weights, logprobs, _, _ = drawn.candidates
        drawn.selected.zero_()  # other rows are told nothing
        select_beams(
            self._list,
            self._totals,
            self._orders,
            token_ids,
            weights,
            logprobs,
            chosen=drawn.token_ids,
            chosen_logprobs=drawn.logprobs,
            parents=self.parents,
            told=drawn.selected,
        )

    def _give_slots(self, selections: Sequence[Selection]) -> None:
        """Every search keeps its slot for as long as it is chosen for."""
        numbers = {selection.number for selection in selections}
        if numbers == self._slot_of.keys():
            return
        self._slot_of = {number: slot for number, slot in self._slot_of.items() if number in numbers}
        taken = set(self._slot_of.values())
        free = (slot for slot in range(len(self._totals)) if slot not in taken)
        for number in numbers - self._slot_of.keys():
            self._slot_of[number] = next(free)
