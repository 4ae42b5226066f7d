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
        """Where some rows are drawn without replacement: these by their keys, the others in the same bits as ever."""
        self.by_weight(raw, left, processing, drawn)
        logits, scores = left
        candidates, temperatures, size = drawn.candidates, processing.temperatures, logits.shape[0]
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
        token_ids = torch.empty_like(candidates.token_ids)
        unused = torch.empty_like(candidates.weights)
        into = Reports(self._unused.logprobs[:size], self._unused.ranks[:size], token_ids, unused)
        report(noisy, noisy_scores, drawn.token_ids, into, with_ranks=False)
        top, scale = scores.largest.amax(-1, keepdim=True), temperatures.clamp_min(COLDEST.value)[:, None]
        whole = self._log_sum((scores.largest - top) / scale + scores.sums.log())
        chosen = logits.gather(1, token_ids)
        weights = ((chosen - top) / scale - whole).masked_fill(chosen < processing.floors[:, None], -torch.inf)
        logprobs = raw.logits.gather(1, token_ids) - self._log_sum(raw.scores.largest + raw.scores.raw_sums.log())
        is_distinct = numbers.floats[column.DISTINCT][:, None] > 0
        for listed, own in zip(candidates[:3], (token_ids, weights, logprobs), strict=True):
            listed.copy_(torch.where(is_distinct, own, listed))
        candidates.keys.copy_(noisy.gather(1, token_ids) - whole)

    def by_weight(self, raw: Scored, left: Scored, processing: Processing, drawn: Drawn) -> None:
        candidates, size = drawn.candidates, left.logits.shape[0]
        into = Reports(self._unused.logprobs[:size], self._unused.ranks[:size], *candidates[:2])
        report(left.logits, left.scores, drawn.token_ids, into, processing, with_ranks=False)
        masses = raw.scores.largest + raw.scores.raw_sums.log()
        normaliser = self._log_sum(masses)
        # By indices: torch's gather takes 0.09 ms for these few numbers.
        rows = torch.arange(size, device=raw.logits.device)[:, None]
        candidates.logprobs.copy_(raw.logits[rows, candidates.token_ids] - normaliser)
