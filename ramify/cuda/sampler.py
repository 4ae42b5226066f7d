"""The sampler at the end of a graph: from logits and the rows' numbers to tokens, in buffers that outlive the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.cuda import rows as column
from ramify.cuda.mixture import KernelMixer
from ramify.cuda.results import NOTHING_IN_COMMON_CODE, Drawn, Results
from ramify.cuda.rows import DeviceRows
from ramify.cuda.upload import upload
from ramify.kernels.draw import NOT_FINITE, BlockScores, KeyWords, draw_tokens, keep_above, score_blocks
from ramify.kernels.floors import FloorScratch, find_floors
from ramify.kernels.reports import Processing, report
from ramify.plan import Draw, SamplerKind, StepResult
from ramify.sampling.mixing import Mixer

MOST_REPORTED = 20  # likeliest tokens that a graph reports; who asks for more gets them without a graph


class SamplerChoice(NamedTuple):
    """A kind, and whether logprobs of several tokens are reported."""

    kind: SamplerKind
    reports: bool = False

    @classmethod
    def for_draws(cls, draws: Sequence[Draw]) -> SamplerChoice:
        """The cheapest that serves all."""
        kinds = {item.rules.sampler_kind for item in draws}
        most = max(-1 if item.rules.params.logprobs is None else item.rules.params.logprobs for item in draws)
        if "full" in kinds or most > MOST_REPORTED:
            return cls("full")
        return cls("filtered" if "filtered" in kinds else "plain", reports=most >= 0)


class GraphSampler:
    """Serves the kinds plain and filtered. `drawn` holds what the last step drew, row by row."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode,
        mixer: Mixer | None = None,
    ) -> None:
        self.device = device
        self.max_rows = max_rows
        self._vocab_size = vocab_size
        self._logprobs_mode = logprobs_mode
        self._mixer = None if mixer is None else KernelMixer.of(mixer)
        self._scores = BlockScores.empty(max_rows, vocab_size, device)
        self._floors = torch.empty(max_rows, device=device)
        self._no_floors = torch.full((max_rows,), -torch.inf, device=device)
        self._scratch = FloorScratch.empty(max_rows, vocab_size, device)
        self._num_reported = min(MOST_REPORTED, vocab_size)
        self.drawn = Drawn.empty(max_rows, self._num_reported, device)
        self._results = [Results(max_rows, self._num_reported, device) for _ in range(2)]

    def settle(self, draws: Sequence[Draw], rows: Sequence[int], device_rows: DeviceRows) -> SamplerChoice:
        """Sampling numbers of rows that are new here, output positions of all; returns the sampler that serves all."""
        numbers, floats = device_rows.integer_mirror, device_rows.float_mirror
        for item, row in zip(draws, rows, strict=True):
            if device_rows.rules[row] is item.rules:
                continue
            device_rows.rules[row] = item.rules
            write_draw(item, numbers[:, row], floats[:, row])
        numbers[column.OUTPUT_POSITION, np.asarray(rows, dtype=np.int64)] = [item.position for item in draws]
        return SamplerChoice.for_draws(draws)

    def draw_rows(self, outs: Sequence[Tensor], device_rows: DeviceRows, choice: SamplerChoice) -> None:
        """Into `drawn`, from the logits (R, vocabulary) of each lane; the rows are those of the first."""
        size = outs[0].shape[0]
        numbers, floats = device_rows.integers[:, :size], device_rows.floats[:, :size]
        drawn = self.drawn.of(size)
        if self._mixer is None:
            [out] = outs
            self.draw(out, numbers, floats, choice, drawn)
            return
        teacher, theta = (out[:, : self._vocab_size] for out in outs)
        temperatures = floats[column.TEMPERATURE]
        pair = self._mixer.mix(
            teacher, theta[numbers[column.PARTNER]], temperatures, numbers[column.OUTPUT_POSITION] == 0
        )
        # The temperature is in the mixture; what is left of it is whether the likeliest token is wanted.
        floats = torch.stack([(temperatures > 0).float(), *floats[1:]])
        self.draw(pair.logits.contiguous(), numbers, floats, choice, drawn)
        drawn.faults.masked_fill_(pair.mixed.disjoint, NOTHING_IN_COMMON_CODE)
        drawn.faults.masked_fill_(~pair.mixed.sound, NOT_FINITE)
        drawn.mixture.copy_(pair.numbers(drawn.token_ids))

    def draw(self, out: Tensor, numbers: Tensor, floats: Tensor, choice: SamplerChoice, drawn: Drawn) -> None:
        """From logits (R, vocabulary) and the rows' numbers (columns, R) to tokens, and reports if asked for."""
        temperatures, top_p, min_p = floats
        size = out.shape[0]
        scores = BlockScores(*(part[:size] for part in self._scores))
        score_blocks(out, temperatures, scores)
        floor = None
        if choice.kind == "filtered":
            floor = self._floors[:size]
            find_floors(
                out,
                temperatures,
                scores,
                top_k=numbers[column.TOP_K],
                top_p=top_p,
                min_p=min_p,
                scratch=FloorScratch(*(part[:size] for part in self._scratch)),
                floors=floor,
            )
            keep_above(out, temperatures, floor, scores)
        keys = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.OUTPUT_POSITION)
        draw_tokens(
            out,
            temperatures,
            KeyWords(*(numbers[key] for key in keys)),
            scores,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            faults=drawn.faults,
            floors=floor,
        )
        if choice.reports:
            processing = None
            if self._logprobs_mode == "processed":
                processing = Processing(temperatures, self._no_floors[:size] if floor is None else floor)
            report(out, scores, drawn.token_ids, drawn.reports, processing)

    def fetch(self, choice: SamplerChoice) -> Results:
        """Asks for what the last step drew; the answer can be read when it has arrived."""
        result = self._results[0]
        self._results.reverse()
        result.fetch(self.drawn, with_reports=choice.reports, with_mixture=self._mixer is not None)
        return result

    def draw_some(self, out: Tensor, rows: Sequence[int], draws: Sequence[Draw], choice: SamplerChoice) -> Results:
        """Draws from these rows of the logits, into the first rows of `drawn`; does not wait for them."""
        self._draw_from(out, rows, draws, choice)
        return self.fetch(choice)

    def draw_now(self, out: Tensor, rows: Sequence[int], draws: Sequence[Draw], choice: SamplerChoice) -> StepResult:
        """Any number of draws, as many at a time as the buffers take; waits for them."""
        whole = StepResult([], [])
        for start in range(0, len(draws), self.max_rows):
            some = draws[start : start + self.max_rows]
            self._draw_from(out, rows[start : start + self.max_rows], some, choice)
            free = self._results[0]  # not the other: the step before may not have been read yet
            free.fetch(self.drawn.of(len(some)), with_reports=choice.reports)
            part = free.read(range(len(some)), some)
            whole.token_ids.extend(part.token_ids)
            whole.logprobs.extend(part.logprobs)
            whole.faults.update({start + place: fault for place, fault in part.faults.items()})
            whole.reports.update({start + place: told for place, told in part.reports.items()})
        return whole

    def _draw_from(self, out: Tensor, rows: Sequence[int], draws: Sequence[Draw], choice: SamplerChoice) -> None:
        numbers = np.zeros((column.NUM_INTEGERS, len(draws)), np.int64)
        floats = np.zeros((column.NUM_FLOATS, len(draws)), np.float32)
        for place, item in enumerate(draws):
            write_draw(item, numbers[:, place], floats[:, place])
        chosen = out[upload(rows, self.device)]
        self.draw(chosen, upload(numbers, self.device), upload(floats, self.device), choice, self.drawn.of(len(draws)))


def write_draw(item: Draw, numbers: NDArray[np.int64], floats: NDArray[np.float32]) -> None:
    """What names a draw's noise and filters, into a row's columns; the words are those of `NoiseKeys.of`."""
    mask, params = 0xFFFFFFFF, item.rules.params
    numbers[column.SEED_LOW] = item.seed & mask
    numbers[column.SEED_HIGH] = (item.seed >> 32) & mask
    numbers[column.CHILD] = item.child | (1 << 31 if item.seed < 0 else 0)
    numbers[column.OUTPUT_POSITION] = item.position
    numbers[column.TOP_K] = min(max(params.top_k, 0), 2**31 - 1)
    floats[:] = params.temperature, params.top_p, params.min_p
