"""top-k, top-p, min-p. Each is a floor: the smallest logit of a row that stays; what ties with it stays too.

    top-k   the k-th largest
    top-p   where the mass of what top-k left, renormalised, reaches p: the crossing token stays
    min-p   the largest + log(min_p)

The vocabulary is not sorted. Nearly always a row's few largest logits are enough to know its floor; a flat row under
top-p is put into buckets by size, and only the bucket in which the mass crosses p is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

USUALLY_ENOUGH = 64
NUM_BUCKETS = 4096
BUCKETS_REACH = 40.0  # how far below the largest logit the buckets go; what is lower shares the last
_LARGEST_BELOW_ZERO = -1e-45  # rounds to the smallest subnormal number


@dataclass(frozen=True, slots=True)
class Filters:
    """(R,) each; None where no row asks. Neutral values: k = vocabulary, p = 1, min-p = 0."""

    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def of(self, rows: Tensor) -> Filters:
        return Filters(*(None if column is None else column[rows] for column in (self.top_k, self.top_p, self.min_p)))


def apply(logits: Tensor, filters: Filters) -> Tensor:
    """Logits (R, vocabulary) with everything below its row's floor at minus infinity; rows may shift by a constant."""
    floor = floors(logits, filters)
    bounded = floor.isfinite()
    if bool(bounded.all()):
        # A threshold at zero is a dozen times quicker than a mask.
        return F.threshold(logits - floor, _LARGEST_BELOW_ZERO, -torch.inf, inplace=True)
    # The same shift as above, so that a row's bits do not depend on who stands beside it.
    return torch.where(bounded, logits - floor, logits).masked_fill_(logits < floor, -torch.inf)


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
    count = 1 if filters.top_p is None else USUALLY_ENOUGH
    if filters.top_k is not None:  # top-p needs the k largest, and one more to see that no further one ties
        asked = filters.top_k[filters.top_k < vocab_size]
        count = max(count, int(asked.max()) + 1 if asked.numel() else 1)
    count = min(count, vocab_size)
    ordered = logits.topk(count, dim=-1).values
    floor, decided = _floors_among(ordered, logits, filters)
    if count < vocab_size and not bool(decided.all()):
        for row in (~decided).nonzero()[:, 0].tolist():
            assert filters.top_p is not None, "top-k alone is always decided"
            kept = logits[row] if filters.top_k is None else logits[row][logits[row] >= floor[row]]
            floor[row] = _crossing(kept, filters.top_p[row])
    return floor


def _floors_among(ordered: Tensor, logits: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Floors (R, 1) by a row's largest values, in order; and whether those were enough to know (R,).

    Where they were not, the floor is top-k's alone.
    """
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
        total = kept.logsumexp(-1)
        if not bool(narrowed.all()):
            total = torch.where(narrowed, total, logits.logsumexp(-1))
        reached = (kept - total[:, None]).exp().cumsum(-1, dtype=torch.float64)
        crossing = (reached < filters.top_p[:, None]).sum(-1, keepdim=True)
        asks = filters.top_p < 1
        if count < vocab_size:
            # Ties at minus infinity have no mass; a row that has nothing else must not come as far as `_crossing`.
            further_ties = narrowed & (ordered[:, -1] >= floor[:, 0]) & (ordered[:, -1] > -torch.inf)
            decided = ~asks | ((crossing[:, 0] < count) & ~further_ties)
        # Rounding may leave the whole mass just below p: then all that top-k left stays.
        chosen = torch.where(crossing < count, ordered.gather(1, crossing.clamp_max(count - 1)), floor)
        floor = torch.where((asks & decided)[:, None], torch.maximum(floor, chosen), floor)
    return floor, decided


def _crossing(values: Tensor, mass: Tensor) -> Tensor:
    """The largest of `values` (N,) such that it and all larger ones hold `mass` of the total; else the smallest."""
    below = values.amax() - values
    weights = (-below).exp().double()
    buckets = (below * (NUM_BUCKETS / BUCKETS_REACH)).clamp_max(NUM_BUCKETS - 1).to(torch.int64)
    reached = torch.bincount(buckets, weights=weights, minlength=NUM_BUCKETS).cumsum(0)
    wanted = mass.double() * reached[-1]
    bucket = (reached < wanted).sum().clamp_max(NUM_BUCKETS - 1)
    inside = values[buckets == bucket].sort(descending=True).values
    before = torch.where(bucket > 0, reached[(bucket - 1).clamp_min(0)], reached.new_zeros(()))
    filled = before + (inside - values.amax()).exp().double().cumsum(0)
    return inside[(filled < wanted).sum().clamp_max(len(inside) - 1)]
