"""top-k, top-p, min-p. Each is a floor: the smallest logit of a row that stays; what ties with it stays too.

Floors need the largest logits of a row, in order. Nearly always the first 256 of them are enough, and the vocabulary is
not sorted; a row for which they are not is sorted whole.

    top-k   the k-th largest
    top-p   where the mass of what top-k left, renormalised, reaches p: the crossing token stays
    min-p   the largest + log(min_p)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

USUALLY_ENOUGH = 256


@dataclass(frozen=True, slots=True)
class Filters:
    """(R,) each; None where no row asks. Neutral values: k = vocabulary, p = 1, min-p = 0."""

    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def of(self, rows: Tensor) -> Filters:
        return Filters(*(None if item is None else item[rows] for item in (self.top_k, self.top_p, self.min_p)))


def apply(logits: Tensor, filters: Filters) -> Tensor:
    """Logits (R, vocabulary) with everything below its row's floor at minus infinity."""
    floor = floors(logits, filters)
    return logits.masked_fill(logits < floor, -torch.inf)


def floors(logits: Tensor, filters: Filters) -> Tensor:
    """(R, 1): the smallest logit that stays."""
    floor = logits.new_full((logits.shape[0], 1), -torch.inf)
    if filters.top_k is not None or filters.top_p is not None:
        floor = _ranked_floors(logits, filters)
    if filters.min_p is not None:
        likeliest = logits.amax(-1, keepdim=True)
        # Rounding must not throw out the likeliest itself.
        floor = torch.maximum(floor, torch.minimum(likeliest, likeliest + filters.min_p.log()[:, None]))
    return floor


def _ranked_floors(logits: Tensor, filters: Filters) -> Tensor:
    vocab_size = logits.shape[1]
    count = USUALLY_ENOUGH
    if filters.top_k is not None:  # top-p then needs the k largest, and one more to see that no further one ties
        asked = filters.top_k[filters.top_k < vocab_size]
        count = max(count, int(asked.max()) + 1 if asked.numel() else 0)
    count = min(count, vocab_size)
    ordered = logits.topk(count, dim=-1).values
    floor, decided = _floors_among(ordered, logits, filters)
    if count < vocab_size and not bool(decided.all()):
        rows = (~decided).nonzero()[:, 0]
        whole = _sorted(logits[rows])
        floor[rows] = _floors_among(whole, logits[rows], filters.of(rows))[0]
    return floor


def _floors_among(ordered: Tensor, logits: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Floors (R, 1) by a row's largest values, in order; and whether those were enough to know (R,)."""
    rows, count = ordered.shape
    vocab_size = logits.shape[1]
    floor = ordered.new_full((rows, 1), -torch.inf)
    decided = torch.ones(rows, dtype=torch.bool, device=ordered.device)
    narrowed = torch.zeros_like(decided)
    if filters.top_k is not None:
        narrowed = filters.top_k < vocab_size
        kth = ordered.gather(1, filters.top_k.clamp_max(count)[:, None] - 1)
        floor = torch.where(narrowed[:, None], kth, floor)
    if filters.top_p is not None:
        kept = ordered.masked_fill(ordered < floor, -torch.inf)
        total = logits.logsumexp(-1) if not bool(narrowed.all()) else kept.logsumexp(-1)
        total = torch.where(narrowed, kept.logsumexp(-1), total)
        reached = (kept - total[:, None]).exp().cumsum(-1, dtype=torch.float64)
        crossing = (reached < filters.top_p[:, None]).sum(-1, keepdim=True)
        asks = filters.top_p < 1
        inside = (crossing[:, 0] < count) & ~(narrowed & (ordered[:, -1] >= floor[:, 0]))
        decided = inside | ~asks | torch.tensor(count == vocab_size, device=ordered.device)
        # Rounding may leave the whole mass just below p: then all that top-k left stays.
        chosen = torch.where(crossing < count, ordered.gather(1, crossing.clamp_max(count - 1)), floor)
        floor = torch.where(asks[:, None], torch.maximum(floor, chosen), floor)
    return floor, decided


def _sorted(logits: Tensor) -> Tensor:
    """Each row's values, largest first. numpy sorts three times faster than torch on a CPU."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    import numpy as np

    return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
