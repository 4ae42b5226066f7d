"""What a step draws: on the device where the next step reads it, and in pinned memory where the host does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import NOT_FINITE, Asking, Draw, Expansions, Selected, StepResult, TokenReport, quickly
from ramify.gpu.kernels import race as codes
from ramify.gpu.kernels import selection
from ramify.gpu.kernels.selection import NUM_TOLD
from ramify.gpu.kernels.top_logprobs import Reports
from ramify.sampling.mixing import NUM_MIXTURE_NUMBERS, as_reports
from ramify.sampling.piece import NOTHING_IN_COMMON, NOTHING_LEFT

NOTHING_IN_COMMON_CODE = 3  # beside those of the draw: two models rule out all that the other allows
FAULTS = {
    codes.NOT_FINITE: NOT_FINITE,
    codes.NOTHING_LEFT: NOTHING_LEFT,
    NOTHING_IN_COMMON_CODE: NOTHING_IN_COMMON,
}


class Candidates(NamedTuple):
    """The likeliest tokens after controls and filters, of R rows: what beams are chosen from."""

    token_ids: Tensor  # (R, count) int64, likeliest first
    weights: Tensor  # (R, count) float32: their logprobs there
    logprobs: Tensor  # (R, count) float32: by the model's own distribution
    keys: Tensor  # (R, count) float32: without replacement, their weights with their noise
    ranks: Tensor  # (R, count) int32: in the distribution that is reported, where that is asked for


class Drawn(NamedTuple):
    """Of R rows: tokens (R,) int64, logprobs (R,), faults (R,) int32, and what is reported beside them.

    mixture (R, 9) has the numbers of a MixtureReport, where two models are mixed.
    """

    token_ids: Tensor
    logprobs: Tensor
    faults: Tensor
    reports: Reports
    candidates: Candidates
    mixture: Tensor
    remembered: Tensor  # (R, 2) float64: what a draw leaves for the next
    selected: Tensor  # (R, NUM_TOLD) int64: of beams that go on, what the device chose (kernels/selection.py)

    @classmethod
    def empty(cls, rows: int, num_reported: int, device: torch.device, *, pinned: bool = False) -> Drawn:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)

        reports = Reports(
            zeros(rows),
            zeros(rows, dtype=torch.int32),
            zeros(rows, num_reported, dtype=torch.int64),
            zeros(rows, num_reported),
        )
        return cls(
            zeros(rows, dtype=torch.int64),
            zeros(rows),
            zeros(rows, dtype=torch.int32),
            reports,
            Candidates(
                zeros(rows, num_reported, dtype=torch.int64),
                zeros(rows, num_reported),
                zeros(rows, num_reported),
                zeros(rows, num_reported),
                zeros(rows, num_reported, dtype=torch.int32),
            ),
            zeros(rows, NUM_MIXTURE_NUMBERS, dtype=torch.float64),
            zeros(rows, 2, dtype=torch.float64),
            zeros(rows, NUM_TOLD.value, dtype=torch.int64),
        )

    def of(self, rows: int) -> Drawn:
        """The first so many rows."""
        return Drawn(
            self.token_ids[:rows],
            self.logprobs[:rows],
            self.faults[:rows],
            Reports(*(part[:rows] for part in self.reports)),
            Candidates(*(part[:rows] for part in self.candidates)),
            self.mixture[:rows],
            self.remembered[:rows],
            self.selected[:rows],
        )


class Results:
    """Pinned memory that the results of one step arrive in."""

    def __init__(self, rows: int, num_reported: int, device: torch.device, *, tells_processed: bool = False) -> None:
        self._tells_processed = tells_processed
        on_gpu = device.type == "cuda"
        self._host = Drawn.empty(rows, num_reported, torch.device("cpu"), pinned=on_gpu)
        self._choice = SamplerChoice("plain")
        self._has_mixture = False
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fetch(self, drawn: Drawn, choice: SamplerChoice, *, with_mixture: bool = False) -> None:
        """Asks for them; does not wait."""
        self._choice, self._has_mixture = choice, with_mixture
        targets = self._host.of(drawn.token_ids.shape[0])
        pairs = list(zip(targets[:3], drawn[:3], strict=True))
        if choice.reports:
            pairs += zip(targets.reports, drawn.reports, strict=True)
        if choice.candidates:
            unasked = {
                name for name, is_asked in (("keys", choice.distinct), ("ranks", choice.reports)) if not is_asked
            }
            both = zip(Candidates._fields, targets.candidates, drawn.candidates, strict=True)
            pairs += [(target, source) for name, target, source in both if name not in unasked]
        if with_mixture:
            pairs.append((targets.mixture, drawn.mixture))
        if choice.remembers:
            pairs.append((targets.remembered, drawn.remembered))
        if choice.chooses:
            pairs.append((targets.selected, drawn.selected))
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def read(self, rows: Sequence[int] | NDArray[np.int64], draws: Sequence[Asking]) -> StepResult:
        """Waits; in the order of the plan's draws, whose rows these are."""
        if self._arrived is not None:
            self._arrived.synchronize()
        index = np.asarray(rows, dtype=np.int64)
        token_ids, logprobs, faults = (part.numpy()[index] for part in self._host[:3])
        messages = {draw: FAULTS[int(faults[draw])] for draw in np.flatnonzero(faults).tolist()}
        reports = self._read_reports(index, draws) if self._choice.reports else {}
        selected = self._read_selected(index, draws) if self._choice.chooses and not messages else {}
        expansions = self._read_candidates(index, draws, selected) if self._choice.candidates else {}
        result = StepResult(token_ids.tolist(), logprobs.tolist(), messages, reports, expansions, selected=selected)
        if self._has_mixture:
            result.mixtures.update(enumerate(as_reports(self._host.mixture[index])))
        return result

    def read_remembered(self, rows: Sequence[int] | NDArray[np.int64]) -> list[list[float]]:
        """What draws in these rows left for the next; `read` has waited for it."""
        left: list[list[float]] = self._host.remembered.numpy()[np.asarray(rows, dtype=np.int64)].tolist()
        return left

    def _read_reports(self, index: NDArray[np.int64], draws: Sequence[Asking]) -> dict[int, TokenReport]:
        """Copies, since the next step but one writes here again."""
        logprobs, ranks, top_ids, top_logprobs = (part.numpy()[index] for part in self._host.reports)
        told = {}
        for number, (draw, logprob, rank) in enumerate(zip(draws, logprobs.tolist(), ranks.tolist(), strict=True)):
            count = draw.demands.params.logprobs
            if count is not None and not draw.demands.is_search:
                told[number] = TokenReport(logprob, rank, top_ids[number, :count], top_logprobs[number, :count])
        return told

    def _read_selected(self, index: NDArray[np.int64], draws: Sequence[Asking]) -> dict[int, Selected]:
        """Of beams whose continuations the host can take over from the device, and nothing more is to be told."""
        told = self._host.selected.numpy()[index]
        totals = told[:, selection.TOTAL.value].copy().view(np.float64).tolist()
        parents, standings, are_all = told[:, : selection.TOTAL.value].T.tolist()
        selected = {}
        for number, draw in enumerate(draws):
            if not are_all[number] or not isinstance(draw, Draw):
                continue
            demands = draw.demands
            if draw.position + 1 < demands.longest_output and demands.params.logprobs is None:
                selected[number] = quickly(Selected, (parents[number], standings[number], totals[number]))
        return selected

    def _read_candidates(
        self, index: NDArray[np.int64], draws: Sequence[Asking], selected: Collection[int]
    ) -> dict[int, Expansions]:
        """But of draws whose choice is told."""
        asked: dict[int, list[int]] = {}  # by how many candidates
        for number, draw in enumerate(draws):
            if number in selected:
                continue
            asked.setdefault(draw.demands.num_candidates, []).append(number)
        asked.pop(0, None)
        token_ids, weights, logprobs, keys, ranks = (part.numpy() for part in self._host.candidates)
        told = {}
        for count, numbers in asked.items():
            rows = index[numbers]
            columns = (part[rows, :count].tolist() for part in (token_ids, logprobs, weights))
            for number, *each in zip(numbers, *columns, strict=True):
                told[number] = quickly(Expansions, (*each, None, None, None))
        if self._choice.distinct:
            for number, expansions in told.items():
                if draws[number].demands.is_distinct:
                    own = keys[int(index[number]), : len(expansions.token_ids)].tolist()
                    told[number] = expansions._replace(keys=own)
        if self._choice.reports:
            shown = weights if self._tells_processed else logprobs
            for number, expansions in told.items():
                num_reported, row = draws[number].demands.params.logprobs, int(index[number])
                if num_reported is not None:
                    reports = self._read_reports_of(
                        row, num_reported, shown[row], ranks[row], len(expansions.token_ids)
                    )
                    told[number] = expansions._replace(reports=reports)
        return told

    def _read_reports_of(
        self, row: int, num_reported: int, logprobs: NDArray[np.float32], ranks: NDArray[np.int32], count: int
    ) -> list[TokenReport]:
        """Of a beam's candidates: the likeliest in their stead are the same for all of them."""
        tops = (part.numpy()[row, :num_reported].copy() for part in self._host.reports[2:])
        top_ids, top_logprobs = tops
        pairs = zip(logprobs[:count].tolist(), ranks[:count].tolist(), strict=True)
        return [TokenReport(logprob, rank, top_ids, top_logprobs) for logprob, rank in pairs]
