"""What a few rows ask for, as tensors: made when the rows change, kept while they stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.plan import Draw, Rules
from ramify.sampling.filters import Filters

Pairs = tuple[Tensor, Tensor]  # rows and token ids, of one length
LARGEST = 1e30  # what callers may ask for beyond it, or beyond its inverse, would be infinite or 0 in float32


class Settings:
    """Of R rows. None stands for what no row asks for."""

    def __init__(self, rules: list[Rules], vocab_size: int, device: torch.device) -> None:
        self.rules = rules
        params = [item.params for item in rules]
        beams = [item.num_candidates > 0 for item in rules]
        greedy = [item.temperature == 0 and not beam for item, beam in zip(params, beams, strict=True)]
        random = [not item and not beam for item, beam in zip(greedy, beams, strict=True)]
        self.has_greedy, self.has_random, self.has_beams = any(greedy), any(random), any(beams)
        self.has_reports = any(item.logprobs is not None for item in params)
        self.has_min_tokens = any(item.min_tokens for item in params)
        self.has_bad_words = any(item.bad_words for item in rules)
        self.has_processors = any(item.logits_processors for item in params)
        self.is_diverse = any(item.diversity_penalty for item in rules)
        self.is_greedy = torch.tensor(greedy, device=device)

        def column(values: Sequence[float], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)

        temperatures = [
            min(item.temperature, LARGEST) if rolls else 1.0 for item, rolls in zip(params, random, strict=True)
        ]
        self.temperatures = column(temperatures, 1.0)
        self.unscaled = None  # (R, 1): rows that stay as they are, beside others that are scaled
        if self.temperatures is not None and 1.0 in temperatures:
            self.unscaled = (self.temperatures == 1)[:, None]
        self.repetition = column([min(max(item.repetition_penalty, 1 / LARGEST), LARGEST) for item in params], 1.0)
        self.frequency = self.presence = None
        if any(item.frequency_penalty or item.presence_penalty for item in params):
            self.frequency = torch.tensor([item.frequency_penalty for item in params], device=device)
            self.presence = torch.tensor([item.presence_penalty for item in params], device=device)
        self.allowed = _pairs(
            [(row, token) for row, item in enumerate(params) for token in item.allowed_token_ids or ()], device
        )
        biases = [(row, *pair) for row, item in enumerate(params) for pair in (item.logit_bias or {}).items()]
        places = _pairs([item[:2] for item in biases], device)
        self.bias = None
        if places is not None:
            amounts = [min(max(item[2], -LARGEST), LARGEST) for item in biases]
            self.bias = (*places, torch.tensor(amounts, dtype=torch.float32, device=device))

        counts = [min(item.top_k, vocab_size) if item.top_k > 0 else vocab_size for item in params]
        narrows = [
            not row_greedy and (count < vocab_size or item.top_p < 1 or item.min_p > 0)
            for item, count, row_greedy in zip(params, counts, greedy, strict=True)
        ]
        chosen = [row for row, value in enumerate(narrows) if value]
        self.filters: Filters | None = None
        self.filtered_rows = None if all(narrows) else torch.tensor(chosen, dtype=torch.long, device=device)
        if chosen:
            self.filters = Filters(
                column([counts[row] for row in chosen], vocab_size, torch.long),
                column([params[row].top_p for row in chosen], 1.0),
                column([params[row].min_p for row in chosen], 0.0),
            )


class KnownSettings:
    """Settings by the place of their first row, of this step and the one before."""

    def __init__(self) -> None:
        self._before: dict[int, Settings] = {}
        self._now: dict[int, Settings] = {}

    def begin(self) -> None:
        self._before, self._now = self._now, {}

    def of(self, place: int, rules: list[Rules], vocab_size: int, device: torch.device) -> Settings:
        known = self._before.get(place)
        if known is None or known.rules != rules:
            known = Settings(rules, vocab_size, device)
        self._now[place] = known
        return known


def pairs_of_outputs(draws: Sequence[Draw], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct (row, token id) of the outputs of rows that have these penalties, and how often each occurs."""
    outputs = [
        item.output if item.rules.params.frequency_penalty or item.rules.params.presence_penalty else ()
        for item in draws
    ]
    places, counts = np.unique(_flat(outputs, vocab_size), return_counts=True)
    rows, token_ids = np.divmod(places, vocab_size)
    return (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(counts).to(device, torch.float32),
    )


def pairs_of_seen(draws: Sequence[Draw], role: int, vocab_size: int, device: torch.device) -> Pairs:
    """Distinct (row, token id) of one track's prompts and the outputs of the rows that have a repetition penalty."""
    asking = [item.rules.params.repetition_penalty != 1 for item in draws]
    outputs = [item.output if asks else () for item, asks in zip(draws, asking, strict=True)]
    places = [_flat(outputs, vocab_size)]
    for row, item in enumerate(draws):
        if asking[row]:
            places.append(item.rules.distinct_prompts[role] + row * vocab_size)
    rows, token_ids = np.divmod(np.unique(np.concatenate(places)), vocab_size)
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
