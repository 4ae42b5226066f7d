"""What a few rows ask for, as tensors: made when the rows change, kept while they stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.engine.demands import LARGEST, Demands
from ramify.engine.plan import Draw
from ramify.sampling.columns import MIN_P, TOP_K, Columns
from ramify.sampling.filters import Filters
from ramify.sampling_params import SamplingParams

Pairs = tuple[Tensor, Tensor]  # rows and token ids, of one length


class Chosen(NamedTuple):
    """The rows that ask for a rule (None: all), and what they ask for, a column (rows,) for each of its numbers."""

    rows: Tensor | None
    columns: tuple[Tensor, ...]


# What rows ask of each rule beyond top-k, top-p and min-p, by the rule's first field; the others are its companions.
RULES: dict[str, tuple[str, ...]] = {
    "top_n_sigma": (),
    "dynatemp_range": ("dynatemp_exponent",),
    "smoothing_factor": (),
    "typical_p": (),
    "epsilon_cutoff": (),
    "eta_cutoff": (),
    "top_a": (),
    "p_less": (),
}


class Settings:
    """Of R rows. None stands for what no row asks for."""

    def __init__(self, demands: list[Demands], columns: Columns, vocab_size: int, device: torch.device) -> None:
        """columns of these R rows."""
        self.demands = demands
        params = [each.params for each in demands]
        self.has_greedy = any(each.is_greedy for each in demands)
        self.has_random = any(each.is_random for each in demands)
        self.has_beams = any(each.is_search for each in demands)
        self.has_reports = any(each.logprobs is not None for each in params)
        self.has_kept = any(each.return_kept is not None for each in params)
        self.has_min_tokens = any(each.min_tokens for each in params)
        self.has_bad_words = any(each.bad_words for each in demands)
        self.has_processors = any(each.logits_processors for each in params)
        self.is_diverse = any(each.diversity_penalty for each in demands)
        self.has_ngrams = any(each.no_repeat_ngram_size for each in params)
        self.is_dry = any(each.dry_multiplier for each in params)
        self.follows_surprise = any(each.params.mirostat_tau and not each.is_greedy for each in demands)
        self.has_codes = any(each.is_arithmetic for each in demands)
        self.excludes = any(
            each.xtc_probability and not demand.is_greedy for each, demand in zip(params, demands, strict=True)
        )
        temperatures, top_p, min_p = torch.tensor(columns.floats[: MIN_P + 1], device=device)
        self.is_greedy = temperatures == 0
        self.is_raced = ~self.is_greedy  # (R,): whose token the race decides
        if self.has_codes:
            self.is_raced &= torch.tensor([not each.is_arithmetic for each in demands], device=device)
        self.temperatures = None
        if any(each.temperature not in (0, 1) or each.params.dynatemp_range > 0 for each in demands):
            self.temperatures = torch.where(self.is_greedy, 1, temperatures)

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self.repetition = self.frequency = self.presence = None
        if any(each.counts_prompt for each in demands):
            self.repetition = column([min(max(each.repetition_penalty, 1 / LARGEST), LARGEST) for each in params])
        if any(each.counts_output for each in demands):
            self.frequency = column([each.frequency_penalty for each in params])
            self.presence = column([each.presence_penalty for each in params])
        self.allowed = _pairs(
            [(row, token_id) for row, each in enumerate(params) for token_id in each.allowed_token_ids or ()], device
        )
        biases = [(row, *pair) for row, each in enumerate(params) for pair in (each.logit_bias or {}).items()]
        biased = _pairs([(row, token_id) for row, token_id, _ in biases], device)
        self.bias = None
        if biased is not None:
            self.bias = (*biased, column([min(max(amount, -LARGEST), LARGEST) for _, _, amount in biases]))

        # By the rule's name, those that some row asks for.
        self.chosen = _chosen(demands, device) if any(each.is_shaped for each in demands) else {}
        chosen = [row for row, each in enumerate(demands) if each.narrows]
        self.filters: Filters | None = None
        self.filtered_rows = rows_among(chosen, len(demands), device)
        if chosen:
            narrowing = [params[row] for row in chosen]
            top_k = torch.tensor(columns.integers[TOP_K, chosen], device=device)
            self.filters = Filters(
                torch.where(top_k == 0, vocab_size, top_k.clamp_max(vocab_size))
                if any(each.top_k > 0 for each in narrowing)
                else None,
                top_p[chosen] if any(each.top_p < 1 for each in narrowing) else None,
                min_p[chosen] if any(each.min_p > 0 for each in narrowing) else None,
            )


def _chosen(demands: Sequence[Demands], device: torch.device) -> dict[str, Chosen]:
    found = {}
    for rule, companions in RULES.items():
        neutral = SamplingParams.__dataclass_fields__[rule].default
        rows = [row for row, each in enumerate(demands) if getattr(each.params, rule) != neutral and not each.is_greedy]
        if rows:
            columns = tuple(
                torch.tensor(
                    [min(getattr(demands[row].params, name), LARGEST) for row in rows],
                    dtype=torch.float32,
                    device=device,
                )
                for name in (rule, *companions)
            )
            found[rule] = Chosen(rows_among(rows, len(demands), device), columns)
    return found


def rows_among(rows: Sequence[int], count: int, device: torch.device) -> Tensor | None:
    """As an index; None stands for all of `count` rows, which need not be taken out and put back."""
    return None if len(rows) == count else torch.tensor(rows, dtype=torch.long, device=device)


class KnownSettings:
    """Settings by the index of their first row, of this step and the one before."""

    def __init__(self) -> None:
        self._before: dict[int, Settings] = {}
        self._now: dict[int, Settings] = {}

    def begin(self) -> None:
        self._before, self._now = self._now, {}

    def of(
        self, first: int, draws: Sequence[Draw], columns: Columns, vocab_size: int, device: torch.device
    ) -> Settings:
        known = self._before.get(first)
        demands = [draw.demands for draw in draws]
        if known is None or known.demands != demands:
            known = Settings(demands, columns, vocab_size, device)
        self._now[first] = known
        return known


def pairs_of_outputs(draws: Sequence[Draw], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct (row, token id) of the outputs of rows that have these penalties, and how often each occurs."""
    outputs = [draw.output if draw.demands.counts_output else () for draw in draws]
    distinct, counts = np.unique(_flat(outputs, vocab_size), return_counts=True)
    rows, token_ids = np.divmod(distinct, vocab_size)
    return (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(counts).to(device, torch.float32),
    )


def pairs_of_seen(draws: Sequence[Draw], role: int, vocab_size: int, device: torch.device) -> Pairs:
    """Distinct (row, token id) of one track's prompts and the outputs of the rows that have a repetition penalty."""
    seen = [_flat([draw.output if draw.demands.counts_prompt else () for draw in draws], vocab_size)]
    for row, draw in enumerate(draws):
        if draw.demands.counts_prompt:
            seen.append(draw.demands.distinct_prompts[role] + row * vocab_size)
    rows, token_ids = np.divmod(np.unique(np.concatenate(seen)), vocab_size)
    return torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device)


def _flat(outputs: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Every token as row * vocabulary + token id."""
    lengths = [len(output) for output in outputs]
    tokens = np.fromiter((token for output in outputs for token in output), dtype=np.int64, count=sum(lengths))
    return tokens + np.repeat(np.arange(len(outputs)) * vocab_size, lengths)


def _pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> Pairs | None:
    if not pairs:
        return None
    rows, token_ids = torch.tensor(pairs, dtype=torch.long, device=device).unbind(1)
    return rows, token_ids
