"""top-k, top-p, min-p. Each is a floor: the smallest logit of a row that stays; what ties with it stays too.

    top-k   the k-th largest
    top-p   where the mass of what top-k left, renormalised, reaches p: the crossing token stays
    min-p   the largest + log(min_p)

The vocabulary is not sorted. Nearly always a row's few largest logits are enough to know its floor; flat rows under
top-p are put into buckets by size, and only the bucket in which the mass crosses p is sorted.
"""

from __future__ import annotations

from collections.abc import Callable
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


def cut_below(logits: Tensor, floor: Tensor) -> Tensor:
    """Logits (R, vocabulary) with what is below their row's floor (R, 1) at minus infinity; others keep their bits."""
    return cut(logits, floor).add_(logits)


def cut(values: Tensor, floor: Tensor) -> Tensor:
    """What to add to logits: minus infinity where values (R, vocabulary) are below the floor (R, 1), 0 elsewhere.

    Thresholds are several times quicker than masks.
    """
    above = (values - floor).nan_to_num_(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )  # -inf - -inf is no number
    return F.threshold(above, _LARGEST_BELOW_ZERO, -torch.inf, inplace=True).clamp_max_(0)


def ranked_floors(logits: Tensor, filters: Filters) -> Tensor:
    """(R, 1): the smallest logit that top-k and top-p leave."""
    vocab_size = logits.shape[1]
    count = 1 if filters.top_p is None else USUALLY_ENOUGH
    if filters.top_k is not None:  # top-p needs the k largest, and one more to see that no further one ties
        asked = filters.top_k[filters.top_k < vocab_size]
        count = max(count, int(asked.max()) + 1 if asked.numel() else 1)
    count = min(count, vocab_size)
    ordered = logits.topk(count, dim=-1).values
    floor, decided = _floors_among(ordered, logits, filters)
    if count < vocab_size and not bool(decided.all()):
        assert filters.top_p is not None, "top-k alone is always decided"
        flat = (~decided).nonzero()[:, 0]
        kept = logits[flat] if filters.top_k is None else cut_below(logits[flat], floor[flat])
        likeliest = kept.amax(-1, keepdim=True)
        crossed = crossing(kept, (kept - likeliest).exp_(), filters.top_p[flat])
        floor.index_copy_(0, flat, torch.maximum(floor[flat], crossed))
    return floor


def apply(logits: Tensor, filters: Filters, ranked: Callable[[Tensor, Filters], Tensor] = ranked_floors) -> Tensor:
    """Logits (R, vocabulary) with everything below its row's floor at minus infinity."""
    return cut_below(logits, floors(logits, filters, ranked))


def floors(logits: Tensor, filters: Filters, ranked: Callable[[Tensor, Filters], Tensor] = ranked_floors) -> Tensor:
    """(R, 1): the smallest logit that stays; `ranked` finds those of top-k and top-p."""
    floor = logits.new_full((logits.shape[0], 1), -torch.inf)
    if filters.top_k is not None or filters.top_p is not None:
        floor = ranked(logits, filters)
    if filters.min_p is not None:
        likeliest = logits.amax(-1, keepdim=True)
        # Rounding must not throw out the likeliest itself.
        floor = torch.maximum(floor, torch.minimum(likeliest, likeliest + filters.min_p.log()[:, None]))
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
            # Ties at minus infinity have no mass; a row that has nothing else must not come as far as `crossing`.
            further_ties = narrowed & (ordered[:, -1] >= floor[:, 0]) & (ordered[:, -1] > -torch.inf)
            decided = ~asks | ((crossing[:, 0] < count) & ~further_ties)
        # Rounding may leave the whole mass just below p: then all that top-k left stays.
        chosen = torch.where(crossing < count, ordered.gather(1, crossing.clamp_max(count - 1)), floor)
        floor = torch.where((asks & decided)[:, None], torch.maximum(floor, chosen), floor)
    return floor, decided


def crossing(keys: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """(R, 1): of each row's keys (R, N), the largest such that it and all larger hold that share (R,) of its weights.

    Keys are put into buckets by size, and only the bucket in which the weights reach the share is sorted.
    """
    below = (keys.amax(-1, keepdim=True) - keys).nan_to_num_(nan=BUCKETS_REACH)
    buckets = below.mul_(NUM_BUCKETS / BUCKETS_REACH).clamp_max_(NUM_BUCKETS - 1).to(torch.int64)
    exact = weights.double()
    reached = exact.new_zeros(len(keys), NUM_BUCKETS).scatter_add_(1, buckets, exact).cumsum_(-1)
    wanted = share.double()[:, None] * reached[:, -1:]
    bucket = (reached < wanted).sum(-1, keepdim=True).clamp_max_(NUM_BUCKETS - 1)
    chosen = buckets == bucket
    inside, filling = _members(chosen, keys, exact)
    before = reached.gather(1, (bucket - 1).clamp_min(0)).masked_fill_(bucket == 0, 0.0)
    filled = filling.cumsum_(-1).add_(before)
    # Rounding may leave a bucket's own sum just below the share: then all of it is needed.
    last = chosen.sum(-1, keepdim=True).sub_(1).clamp_min_(0)
    return inside.gather(1, torch.minimum((filled < wanted).sum(-1, keepdim=True), last))


def _members(chosen: Tensor, keys: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of chosen (R, N): their keys from the largest, and their weights (R, widest), filled up with nothing."""
    counts = chosen.sum(-1)
    rows, columns = chosen.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=keys.device) - (counts.cumsum(0) - counts)[rows]
    widest = max(int(counts.max()), 1)  # a row that is no number has no members
    inside = keys.new_full((len(keys), widest), -torch.inf).index_put_((rows, places), keys[rows, columns])
    filling = weights.new_zeros(len(keys), widest).index_put_((rows, places), weights[rows, columns])
    inside, order = inside.sort(dim=-1, descending=True, stable=True)
    return inside, filling.gather(1, order)
