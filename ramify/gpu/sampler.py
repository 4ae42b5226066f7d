"""The sampler at the end of a graph: from logits and the rows' numbers to tokens, in buffers that outlive the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.device.step import Read
from ramify.engine.plan import Draw
from ramify.gpu.kernels.floors import FloorScratch, find_floors
from ramify.gpu.kernels.race import NOT_FINITE, BlockScores, KeyWords, draw_tokens, keep_above, score_blocks
from ramify.gpu.kernels.top_logprobs import Processing, report
from ramify.gpu.mixer import KernelMixer
from ramify.gpu.results import NOTHING_IN_COMMON_CODE, Drawn, Results
from ramify.sampling import columns as column
from ramify.sampling.columns import SamplerChoice
from ramify.sampling.mixing import Mixer

MOST_REPORTED = 20  # likeliest tokens that a graph reports; who asks for more gets them without a graph


class KernelSampler:
    """Serves the kinds plain and filtered. `drawn` holds what the last step drew, row by row."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode,
        mixer: Mixer | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._logprobs_mode = logprobs_mode
        self._mixer = None if mixer is None else KernelMixer.of(mixer)
        self._scores = BlockScores.empty(max_rows, vocab_size, device)
        self._floors = torch.empty(max_rows, device=device)
        self._no_floors = torch.full((max_rows,), -torch.inf, device=device)
        self._scratch = FloorScratch.empty(max_rows, vocab_size, device)
        self._num_reported = min(MOST_REPORTED, vocab_size)
        self._drawn = Drawn.empty(max_rows, self._num_reported, device)
        self._results = [Results(max_rows, self._num_reported, device) for _ in range(2)]

    @property
    def tokens(self) -> Tensor:
        return self._drawn.token_ids

    def choose(self, draws: Sequence[Draw]) -> SamplerChoice | None:
        kinds = {draw.demands.sampler for draw in draws}
        most = max(-1 if draw.demands.params.logprobs is None else draw.demands.params.logprobs for draw in draws)
        if "full" in kinds or most > MOST_REPORTED:
            return None
        return SamplerChoice("filtered" if "filtered" in kinds else "plain", reports=most >= 0)

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        """From the logits (R, vocabulary) of each track and the columns of R draws, into the first R rows."""
        drawn = self._drawn.of(logits[0].shape[0])
        if self._mixer is None:
            [own] = logits
            self._draw(own, integers, floats, choice, drawn)
            return
        teacher, theta = (part[:, : self._vocab_size] for part in logits)
        temperatures = floats[column.TEMPERATURE]
        pair = self._mixer.mix(teacher, theta, temperatures, integers[column.POSITION] == 0)
        # The temperature is in the mixture; what is left of it is whether the likeliest token is wanted.
        floats = torch.stack([(temperatures > 0).float(), *floats[1:]])
        self._draw(pair.logits.contiguous(), integers, floats, choice, drawn)
        drawn.faults.masked_fill_(pair.mixed.disjoint, NOTHING_IN_COMMON_CODE)
        drawn.faults.masked_fill_(~pair.mixed.sound, NOT_FINITE)
        drawn.mixture.copy_(pair.numbers(drawn.token_ids))

    def fetch(self, choice: SamplerChoice, *, at_once: bool = False) -> Read:
        """Asks for what the last step drew; the answer can be read when it has arrived.

        There are two buffers, in turns, since the step before may not have been read yet: what is read at once takes
        no turn.
        """
        result = self._results[0]
        if not at_once:
            self._results.reverse()
        result.fetch(self._drawn, with_reports=choice.reports, with_mixture=self._mixer is not None)
        return result.read

    def _draw(self, out: Tensor, integers: Tensor, floats: Tensor, choice: SamplerChoice, drawn: Drawn) -> None:
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
                top_k=integers[column.TOP_K],
                top_p=top_p,
                min_p=min_p,
                scratch=FloorScratch(*(part[:size] for part in self._scratch)),
                floors=floor,
            )
            keep_above(out, temperatures, floor, scores)
        keys = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.POSITION)
        draw_tokens(
            out,
            temperatures,
            KeyWords(*(integers[key] for key in keys)),
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
