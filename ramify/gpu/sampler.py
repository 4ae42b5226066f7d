"""The sampler at the end of a graph: from logits and the rows' numbers to tokens, in buffers that outlive the step.

controls    penalties, bias, bans                kernels/controls.py, on what controls.py keeps of each sequence
mixture     of two models' logits                mixer.py
filters     top-k, top-p, min-p                  kernels/floors.py
draw        the race                             kernels/race.py
reports     logprobs, and beams' candidates      kernels/top_logprobs.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.device.reads import Int64s
from ramify.device.sampler_kernels import Read
from ramify.engine.demands import MOST_REPORTED, SamplerChoice, SamplerKind
from ramify.engine.plan import Draw
from ramify.gpu.controls import ControlSlots
from ramify.gpu.kernels.controls import control_blocks, count_drawn, match_words
from ramify.gpu.kernels.floors import FloorScratch, find_floors
from ramify.gpu.kernels.race import (
    NOT_FINITE,
    NOTHING_LEFT,
    BlockScores,
    KeyWords,
    draw_tokens,
    keep_above,
    score_blocks,
)
from ramify.gpu.kernels.top_logprobs import Processing, Reports, report
from ramify.gpu.mixer import KernelMixer, row_by_row
from ramify.gpu.results import NOTHING_IN_COMMON_CODE, Drawn, Results
from ramify.sampling import columns as column
from ramify.sampling.mixing import Mixer


class _Scored(NamedTuple):
    """Logits (R, vocabulary) and what one pass left of them."""

    logits: Tensor
    scores: BlockScores


class _Numbers(NamedTuple):
    """The columns of R draws."""

    integers: Tensor
    floats: Tensor

    @property
    def slots(self) -> Tensor:
        return self.integers[column.SLOT]

    @property
    def positions(self) -> Tensor:
        return self.integers[column.POSITION]

    @property
    def temperatures(self) -> Tensor:
        return self.floats[column.TEMPERATURE]

    @property
    def keys(self) -> KeyWords:
        words = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.POSITION)
        return KeyWords(*(self.integers[word] for word in words))


class KernelSampler:
    """Serves all that its kernels have room for. `drawn` holds what the last step drew, row by row."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode,
        mixer: Mixer | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self._logprobs_mode = logprobs_mode
        self._batch_invariant = batch_invariant
        self._mixer = None if mixer is None else KernelMixer.of(mixer, each_alone=batch_invariant)
        self._scores = BlockScores.empty(max_rows, vocab_size, device)
        self._raw_scores = BlockScores.empty(max_rows, vocab_size, device)
        num_tracks = 1 if mixer is None else 2
        self._controlled = [torch.empty(max_rows, vocab_size, device=device) for _ in range(num_tracks)]
        self._slots = ControlSlots(max_rows, vocab_size, device)
        self._floors = torch.empty(max_rows, device=device)
        self._no_floors = torch.full((max_rows,), -torch.inf, device=device)
        self._scratch = FloorScratch.empty(max_rows, vocab_size, device)
        self._num_reported = min(MOST_REPORTED, vocab_size)
        self._drawn = Drawn.empty(max_rows, self._num_reported, device)
        self._unused = Reports.empty(max_rows, 0, device)  # where candidates' own logprobs and ranks go
        self._results = [Results(max_rows, self._num_reported, device) for _ in range(2)]

    @property
    def tokens(self) -> Tensor:
        return self._drawn.token_ids

    # -- on the host -----------------------------------------------------------------------------------------

    def serves(self, asked: SamplerChoice) -> bool:
        if self._logprobs_mode == "both" and asked.reports:
            return False
        return asked.kind != "full" and not (self._mixer is not None and asked.candidates)

    def choose(self, asked: Collection[SamplerChoice]) -> SamplerChoice:
        kinds, *others = zip(*asked, strict=True)
        return SamplerChoice("filtered" if "filtered" in kinds else "plain", *map(any, others))

    def every_choice(self) -> list[SamplerChoice]:
        kinds: tuple[SamplerKind, ...] = ("filtered", "plain")
        candidates = (False,) if self._mixer is not None else (False, True)
        answers = product(kinds, (False, True), (False, True), candidates)
        return [choice for answer in answers if self.serves(choice := SamplerChoice(*answer))]

    def settle(self, draws: Sequence[Draw]) -> Int64s:
        return self._slots.settle(draws)

    def go_on(self, slots: Int64s) -> None:
        self._slots.go_on(slots)

    def fetch(self, choice: SamplerChoice, *, at_once: bool = False) -> Read:
        """Asks for what the last step drew; the answer can be read when it has arrived.

        There are two buffers, in turns, since the step before may not have been read yet: what is read at once takes
        no turn.
        """
        result = self._results[0]
        if not at_once:
            self._results.reverse()
        result.fetch(self._drawn, choice, with_mixture=self._mixer is not None)
        return result.read

    # -- on the device ---------------------------------------------------------------------------------------

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        """From the logits (R, vocabulary) of each track and the columns of R draws, into the first R rows."""
        drawn = self._drawn.of(logits[0].shape[0])
        numbers, tables = _Numbers(integers, floats), self._slots.tables
        if choice.controls:
            match_words(numbers.slots, numbers.positions, tables)
        if self._mixer is None:
            [raw] = logits
            if choice.controls:
                before, after = self._control(raw, numbers, track=0)
            else:
                before = after = self._score(raw, numbers)
            self._draw(before, after, numbers, choice, drawn)
        else:
            self._draw_from_two(self._mixer, logits, numbers, choice, drawn)
        if choice.controls:
            count_drawn(drawn.token_ids, numbers.slots, numbers.positions, tables)

    def _draw_from_two(
        self, mixer: KernelMixer, logits: Sequence[Tensor], numbers: _Numbers, choice: SamplerChoice, drawn: Drawn
    ) -> None:
        """Controls act on both models, filters on their mixture, whose logprobs are the raw ones."""
        teacher, theta = (part[:, : self._vocab_size] for part in logits)
        nothing_left = None
        if choice.controls:
            tops = []
            for track, part in enumerate((teacher, theta)):
                _, after = self._control(part, numbers, track=track)
                tops.append(after.scores.largest.amax(-1))
            nothing_left = torch.stack(tops).amin(0) == -torch.inf
            teacher, theta = (part[: len(numbers.slots)] for part in self._controlled)
        pair = mixer.mix(teacher, theta, numbers.temperatures, numbers.positions == 0)
        # The temperature is in the mixture; what is left of it is whether the likeliest token is wanted.
        unscaled = torch.stack([(numbers.temperatures > 0).float(), *numbers.floats[1:]])
        numbers = _Numbers(numbers.integers, unscaled)
        mixed = self._score(pair.logits.contiguous(), numbers)
        self._draw(mixed, mixed, numbers, choice, drawn)
        drawn.faults.masked_fill_(pair.mixed.disjoint, NOTHING_IN_COMMON_CODE)
        if nothing_left is not None:
            drawn.faults.masked_fill_(nothing_left, NOTHING_LEFT)
        drawn.faults.masked_fill_(~pair.mixed.sound, NOT_FINITE)
        drawn.mixture.copy_(pair.numbers(drawn.token_ids))

    def _score(self, logits: Tensor, numbers: _Numbers) -> _Scored:
        scores = self._scores.of(logits.shape[0])
        score_blocks(logits, numbers.temperatures, scores)
        return _Scored(logits, scores)

    def _control(self, raw: Tensor, numbers: _Numbers, *, track: int) -> tuple[_Scored, _Scored]:
        """Before the controls and after."""
        size = raw.shape[0]
        controlled = self._controlled[track][:size]
        raw_scores, scores = self._raw_scores.of(size), self._scores.of(size)
        control_blocks(
            raw,
            numbers.temperatures,
            numbers.slots,
            numbers.positions,
            self._slots.tables,
            track=track,
            controlled=controlled,
            raw_scores=raw_scores,
            scores=scores,
        )
        return _Scored(raw, raw_scores), _Scored(controlled, scores)

    def _draw(self, raw: _Scored, left: _Scored, numbers: _Numbers, choice: SamplerChoice, drawn: Drawn) -> None:
        """From what controls left; logprobs are of the raw logits."""
        temperatures, top_p, min_p = numbers.floats
        logits, scores = left
        size = logits.shape[0]
        floor = None
        if choice.kind == "filtered":
            floor = self._floors[:size]
            find_floors(
                logits,
                temperatures,
                scores,
                top_k=numbers.integers[column.TOP_K],
                top_p=top_p,
                min_p=min_p,
                scratch=FloorScratch(*(part[:size] for part in self._scratch)),
                floors=floor,
            )
            keep_above(logits, temperatures, floor, scores)
        draw_tokens(
            logits,
            temperatures,
            numbers.keys,
            scores,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            faults=drawn.faults,
            floors=floor,
            raw=raw,
        )
        processing = Processing(temperatures, self._no_floors[:size] if floor is None else floor)
        if choice.reports:
            if self._logprobs_mode == "processed":
                report(logits, scores, drawn.token_ids, drawn.reports, processing)
            else:
                report(raw.logits, raw.scores, drawn.token_ids, drawn.reports)
        if choice.candidates:
            self._list_candidates(raw, left, processing, drawn)

    def _list_candidates(self, raw: _Scored, left: _Scored, processing: Processing, drawn: Drawn) -> None:
        candidates, size = drawn.candidates, left.logits.shape[0]
        into = Reports(self._unused.logprobs[:size], self._unused.ranks[:size], *candidates[:2])
        report(left.logits, left.scores, drawn.token_ids, into, processing)
        masses = raw.scores.largest + raw.scores.raw_sums.log()
        if self._batch_invariant:
            normaliser = row_by_row(lambda row: row.logsumexp(-1, keepdim=True), masses)
        else:
            normaliser = masses.logsumexp(-1, keepdim=True)
        candidates.logprobs.copy_(raw.logits.gather(1, candidates.token_ids) - normaliser)
