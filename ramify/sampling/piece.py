"""A few rows on their way through the pipeline: as they come, and after controls and filters, when they are told of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.engine.plan import NOT_FINITE, Draw, Expansions, StepResult, TokenReport
from ramify.sampling.draw import PREFIX_LEVEL, prefix_keys
from ramify.sampling.mixing import MixedRows
from ramify.sampling.operators import Operators
from ramify.sampling.remaining import Remaining
from ramify.sampling.settings import Settings
from ramify.sampling.token_reports import report

NOTHING_IN_COMMON = "the two models have no token in common here: their mixture is empty"
NOTHING_LEFT = (
    "no token is left to draw: structured_outputs, allowed_token_ids, bad_words, logit_bias or processors forbid all"
)


@dataclass(slots=True)
class Rows:
    """A few rows on their way: their settings, what is drawn for them, and what went wrong."""

    settings: Settings
    draws: Sequence[Draw]
    taken: dict[str, list[int]]  # what earlier siblings of each diverse set took in this step
    limits: list[float] = field(default_factory=list)  # of surprise, in bits, where some row follows it (mirostat)
    faults: dict[int, str] = field(default_factory=dict)
    grammatical: dict[int, Tensor] = field(default_factory=dict)  # by row, (vocabulary,): what its grammar allows
    operators: Operators = field(default_factory=Operators)
    role: int = 0  # whose prompt counts: of two models, the teacher's is 0


@dataclass(slots=True)
class Piece:
    """A few rows after controls and filters. What reports need of the whole vocabulary is kept only if one is due."""

    rows: Rows
    normaliser: Tensor  # (R,) log-sum-exp of the raw logits
    best: Tensor  # (R,) the largest after the controls, where a row is greedy; what its code reads, where it has one
    blocks: Tensor  # (R,) the block that won the first level of the race
    inside: Tensor  # (R, 256) its logits
    raw: Tensor  # (R, vocabulary)
    processed: Tensor | None  # (R, vocabulary)
    mode: LogprobsMode
    alive: Tensor | None  # (R,) whether anything is left to draw, where that could fail
    finite: Tensor | None  # (R,) whether no logit of two models was NaN or infinite, where controls may hide that
    mixed: MixedRows | None  # where two models were mixed
    remaining: Remaining | None = None  # after filters, where some row asks for it
    expansions: dict[int, Expansions] = field(default_factory=dict)  # of beams, by row

    def tell(self, indices: Sequence[int], token_ids: Tensor, result: StepResult) -> None:
        """Writes logprobs, faults, reports and expansions of its rows into the result."""
        logprobs = self.raw.gather(1, token_ids[:, None])[:, 0] - self.normaliser
        for index, logprob in zip(indices, logprobs.tolist(), strict=True):
            result.logprobs[index] = logprob
        for row, fault in self.rows.faults.items():
            result.faults[indices[row]] = fault
        finite = self.normaliser.isfinite() if self.mixed is None else self.mixed.mixed.sound
        if self.finite is not None:
            finite = finite & self.finite
        self._tell_faults(indices, finite, NOT_FINITE, result)
        if self.alive is not None:
            self._tell_faults(indices, self.alive, NOTHING_LEFT, result)
        if self.mixed is not None:
            self._tell_faults(indices, ~self.mixed.mixed.disjoint, NOTHING_IN_COMMON, result)
            for index, told in zip(indices, self.mixed.reports(token_ids[:, None]), strict=True):
                result.mixtures[index] = told[0]
        for row, expansions in self.expansions.items():
            result.expansions[indices[row]] = expansions
        if self.rows.settings.has_reports or self.remaining is not None:
            reports = self._reports(token_ids[:, None])
            for row, draw in enumerate(self.rows.draws):
                params = draw.demands.params
                if (params.logprobs is not None or params.return_kept) and not draw.demands.is_search:
                    own = reports[row][0].first(params.logprobs or 0)
                    if self.remaining is not None and params.return_kept is not None:
                        own = own._replace(kept=self.remaining.kept(row, with_ids=params.return_kept == "ids"))
                    result.reports[indices[row]] = own

    def surprises(self, token_ids: Tensor) -> list[float]:
        """Of token_ids (R,), in bits, by what they were drawn from."""
        assert self.processed is not None, "rows that follow surprise keep what they are drawn from"
        whole = self.rows.operators.block_scores(self.processed).logsumexp(-1)
        logprobs = self.processed.gather(1, token_ids[:, None])[:, 0] - whole
        return (-logprobs / math.log(2)).tolist()

    def _tell_faults(self, indices: Sequence[int], sound: Tensor, message: str, result: StepResult) -> None:
        if bool(sound.all()):
            return
        for row in (~sound).nonzero()[:, 0].tolist():
            result.faults.setdefault(indices[row], message)

    def _reports(self, token_ids: Tensor) -> list[list[TokenReport]]:
        """Of each row: its token_ids (R, m) beside as many of the likeliest as the keenest row asks for."""
        count = max(draw.demands.params.logprobs or 0 for draw in self.rows.draws)
        if self.processed is None or self.mode == "raw":
            return report(self.raw, token_ids, count, self.normaliser)
        processed = report(self.processed, token_ids, count)
        if self.mode == "processed":
            return processed
        raw = report(self.raw, token_ids, count, self.normaliser)
        return [
            [own._replace(processed=other) for own, other in zip(*pair, strict=True)]
            for pair in zip(raw, processed, strict=True)
        ]

    def _with_noise(self, processed: Tensor) -> Tensor:
        """Processed (R, vocabulary), with a number for every token in rows that are drawn without replacement."""
        rows = [row for row, draw in enumerate(self.rows.draws) if draw.demands.is_distinct]
        if not rows:
            return processed
        ranked = processed.clone()
        for row in rows:
            draw = self.rows.draws[row]
            keys = prefix_keys(draw.demands.seed, [draw.output], processed.device)
            noise = self.rows.operators.gumbel(keys, torch.zeros_like(keys.child), processed.shape[1], PREFIX_LEVEL)
            ranked[row] += noise[0]
        return ranked

    def expand(self) -> None:
        """For each beam, finds its likeliest tokens by the processed distribution, with both logprobs."""
        assert self.processed is not None, "beams keep what they are chosen from"
        beams = [row for row, draw in enumerate(self.rows.draws) if draw.demands.is_search]
        count = max(self.rows.draws[row].demands.num_candidates for row in beams)
        ranked = self._with_noise(self.processed)
        top = ranked.topk(min(count, ranked.shape[1]), dim=-1)
        # Summed in the same way whatever neighbours ask for: a beam's score has the same bits in every batch.
        scores = self.rows.operators.block_scores
        whole = self.normaliser if self.processed is self.raw else scores(self.processed).logsumexp(-1)
        keys = (top.values - whole[:, None]).tolist()
        weights = (self.processed.gather(1, top.indices) - whole[:, None]).tolist()
        logprobs = (self.raw.gather(1, top.indices) - self.normaliser[:, None]).tolist()
        token_ids = top.indices.tolist()
        reports = self._reports(top.indices) if self.rows.settings.has_reports else []
        mixtures = None if self.mixed is None else self.mixed.reports(top.indices)
        for row in beams:
            demands = self.rows.draws[row].demands
            own = demands.num_candidates
            num_reported = demands.params.logprobs
            self.expansions[row] = Expansions(
                token_ids[row][:own],
                logprobs[row][:own],
                weights[row][:own],
                None if num_reported is None else [told.first(num_reported) for told in reports[row][:own]],
                None if mixtures is None else mixtures[row][:own],
                keys[row][:own] if demands.is_distinct else None,
            )
