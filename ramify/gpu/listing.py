"""Candidates of searches and of draws without replacement: listed after the draw, from what it read."""

from __future__ import annotations

from functools import partial

import torch

from ramify.gpu.kernels.prefix_noise import add_prefix_noise
from ramify.gpu.kernels.race import COLDEST, BlockScores, KeyWords, score_blocks
from ramify.gpu.kernels.top_logprobs import Processing, Reports, report
from ramify.gpu.results import Drawn
from ramify.gpu.scored import Numbers, Scored, log_sum
from ramify.sampling import columns as column


class Listing:
    """Writes the candidates of `Drawn`: their ids, weights, keys and raw logprobs."""

    def __init__(self, max_rows: int, device: torch.device, *, each_alone: bool) -> None:
        self._log_sum = partial(log_sum, each_alone=each_alone)
        self._unused = Reports.empty(max_rows, 0, device)  # where candidates' own logprobs and ranks go

    def by_key(self, raw: Scored, left: Scored, processing: Processing, numbers: Numbers, drawn: Drawn) -> None:
        """Where some rows are drawn without replacement: these by their keys."""
        logits, scores = left
        candidates, temperatures = drawn.candidates, processing.temperatures
        noisy, noisy_scores = torch.empty_like(logits), BlockScores(*map(torch.empty_like, scores))
        words = (column.SEED_LOW, column.SEED_HIGH, column.PREFIX_HIGH, column.PREFIX_LOW)
        add_prefix_noise(
            logits,
            temperatures,
            processing.floors,
            scores,
            KeyWords(*(numbers.integers[word] for word in words)),
            numbers.floats[column.DISTINCT],
            noisy=noisy,
        )
        score_blocks(noisy, torch.ones_like(temperatures), noisy_scores)
        into = Reports(self._unused.logprobs[: len(noisy)], self._unused.ranks[: len(noisy)], *candidates[:2])
        report(noisy, noisy_scores, drawn.token_ids, into)
        top, scale = scores.largest.amax(-1, keepdim=True), temperatures.clamp_min(COLDEST.value)[:, None]
        whole = self._log_sum((scores.largest - top) / scale + scores.sums.log())
        chosen = logits.gather(1, candidates.token_ids)
        weights = (chosen - top) / scale - whole
        candidates.weights.copy_(weights.masked_fill(chosen < processing.floors[:, None], -torch.inf))
        candidates.keys.copy_(noisy.gather(1, candidates.token_ids) - whole)
        own = raw.logits.gather(1, candidates.token_ids)
        candidates.logprobs.copy_(own - self._log_sum(raw.scores.largest + raw.scores.raw_sums.log()))

    def by_weight(self, raw: Scored, left: Scored, processing: Processing, drawn: Drawn) -> None:
        candidates, size = drawn.candidates, left.logits.shape[0]
        into = Reports(self._unused.logprobs[:size], self._unused.ranks[:size], *candidates[:2])
        report(left.logits, left.scores, drawn.token_ids, into, processing)
        masses = raw.scores.largest + raw.scores.raw_sums.log()
        normaliser = self._log_sum(masses)
        # By indices: torch's gather takes 0.09 ms for these few numbers.
        rows = torch.arange(size, device=raw.logits.device)[:, None]
        candidates.logprobs.copy_(raw.logits[rows, candidates.token_ids] - normaliser)
