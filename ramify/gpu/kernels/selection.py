"""Which candidates of beams go on, chosen on the device: what `engine/search/beam.py` chooses for one beam group.

Of each search the continuations of all its beams are ranked by the sum of their weights, in float64 as the host adds
them; of equal ones, the first beam's and likeliest comes first. The first `width` that do not end go on. A beam's first
continuation stays in its place, and others take the places of beams that go no further, the last of these first.

The host is told of each row what it goes on from, and takes that over where nothing else happened: `width` went on, and
none of the better ones ended.

an entry of the list of searches, int64 (the first entry holds their number alone)
| width, candidates, slot, is told, ends | end tokens | rows | lane rows | order | totals, float64 |
  5                                        MOST_ENDS    PLACES each
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.engine.demands import MOST_ENDS

PLACES = tl.constexpr(32)  # of a search, at most: a power of two
LISTED = tl.constexpr(32)  # candidates of a beam, at most: a power of two
WIDTH, COUNT, SLOT, IS_TOLD, NUM_ENDS, ENDS = (tl.constexpr(place) for place in range(6))
ROWS = tl.constexpr(ENDS.value + MOST_ENDS)
LANE_ROWS = tl.constexpr(ROWS.value + PLACES.value)
ORDER = tl.constexpr(LANE_ROWS.value + PLACES.value)
TOTALS = tl.constexpr(ORDER.value + PLACES.value)
FIELDS = tl.constexpr(TOTALS.value + PLACES.value)
# What is told of each row that goes on: the place of its parent, how many stand before it, whether nothing else
# happened in its search, and the sum of its weights (float64).
PARENT, STANDING, IS_ALL, TOTAL = (tl.constexpr(place) for place in range(4))
NUM_TOLD = tl.constexpr(4)


def select_beams(
    searches: Tensor,
    totals: Tensor,
    orders: Tensor,
    token_ids: Tensor,
    weights: Tensor,
    logprobs: Tensor,
    *,
    chosen: Tensor,
    chosen_logprobs: Tensor,
    parents: Tensor,
    told: Tensor,
) -> None:
    """searches (1 + S, FIELDS) int64; totals (S, PLACES) float64 and orders (S, PLACES) int64 by the searches' slots,
    which are read where the list does not tell them, and written; of R rows, token_ids (R, count) int64, weights and
    logprobs (R, count) float32 of candidates, likeliest first. Into chosen (R,) int64 and chosen_logprobs (R,) what
    each row goes on with, into parents (R,) int64 the lane's row that it goes on from, and into told (R, NUM_TOLD)
    int64 what the host is told. A row for which nothing is left goes on from itself.
    """
    num_rows, num_listed = token_ids.shape
    _select[(num_rows,)](
        searches,
        totals,
        orders,
        token_ids,
        weights,
        logprobs,
        chosen,
        chosen_logprobs,
        parents,
        told,
        num_listed=num_listed,
        num_warps=1,
    )


@triton.jit
def _first_in_order(
    sums: tl.tensor, rank: tl.tensor, token_ids: tl.tensor, logprobs: tl.tensor, width: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Of the first `width` continuations in order: from which place, with which token, its logprob, and the sum; then
    how many each place has."""
    places = tl.arange(0, PLACES).to(tl.int64)
    none = tl.zeros((PLACES,), tl.int64)
    from_place, with_token, num_children = none - 1, none, none
    with_logprob = tl.zeros((PLACES,), tl.float32)
    to_total = tl.zeros((PLACES,), tl.float64) + float("-inf")
    for turn in range(width):
        best = tl.max(tl.max(sums, axis=1), axis=0)
        first = tl.min(tl.min(tl.where(sums == best, rank, PLACES * LISTED * 2), axis=1), axis=0)
        is_it = (rank == first) & (sums > float("-inf"))
        place = tl.sum(tl.sum(tl.where(is_it, places[:, None] + 1, 0), axis=1), axis=0) - 1  # -1: nothing is left
        token = tl.sum(tl.sum(tl.where(is_it, token_ids, 0), axis=1), axis=0)
        logprob = tl.sum(tl.sum(tl.where(is_it, logprobs, 0.0), axis=1), axis=0)
        sums = tl.where(is_it, float("-inf"), sums)
        is_turn = places == turn
        from_place = tl.where(is_turn, place, from_place)
        with_token = tl.where(is_turn, token, with_token)
        with_logprob = tl.where(is_turn, logprob, with_logprob)
        to_total = tl.where(is_turn, best, to_total)
        num_children += (places == place).to(tl.int64)
    return from_place, with_token, with_logprob, to_total, num_children


@triton.jit
def _select(
    searches: tl.tensor,
    kept_totals: tl.tensor,
    kept_orders: tl.tensor,
    listed_ids: tl.tensor,
    listed_weights: tl.tensor,
    listed_logprobs: tl.tensor,
    chosen: tl.tensor,
    chosen_logprobs: tl.tensor,
    parents: tl.tensor,
    told: tl.tensor,
    num_listed: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    if number < tl.load(searches):
        entry = searches + (number + 1) * FIELDS
        width, count, slot = tl.load(entry + WIDTH), tl.load(entry + COUNT), tl.load(entry + SLOT)
        is_told = tl.load(entry + IS_TOLD) > 0
        places = tl.arange(0, PLACES).to(tl.int64)
        stands = places < width
        rows = tl.load(entry + ROWS + places, mask=stands, other=0)
        kept = slot * PLACES + places
        host_totals = tl.load(entry + TOTALS + places, mask=stands, other=0).to(tl.float64, bitcast=True)
        totals = tl.where(is_told, host_totals, tl.load(kept_totals + kept, mask=stands, other=0.0))
        host_order = tl.load(entry + ORDER + places, mask=stands, other=0)
        order = tl.where(is_told, host_order, tl.load(kept_orders + kept, mask=stands, other=0))

        listed = tl.arange(0, LISTED).to(tl.int64)
        at = rows[:, None] * num_listed + listed[None, :]
        # Of a vocabulary with fewer tokens than candidates are asked for, all are listed.
        is_listed = stands[:, None] & (listed < tl.minimum(count, num_listed))[None, :]
        token_ids = tl.load(listed_ids + at, mask=is_listed, other=-1)
        logprobs = tl.load(listed_logprobs + at, mask=is_listed, other=0.0)
        sums = totals[:, None] + tl.load(listed_weights + at, mask=is_listed, other=float("-inf")).to(tl.float64)
        is_possible = is_listed & (sums > float("-inf"))  # NaN is not
        may_go_on = is_possible
        for index in range(tl.load(entry + NUM_ENDS)):
            may_go_on = may_go_on & (token_ids != tl.load(entry + ENDS + index))
        best_end = tl.max(tl.max(tl.where(is_possible & ~may_go_on, sums, float("-inf")), axis=1), axis=0)
        sums = tl.where(may_go_on, sums, float("-inf"))
        rank = order[:, None] * LISTED + listed[None, :]  # among equal ones
        from_place, with_token, with_logprob, to_total, num_children = _first_in_order(
            sums, rank, token_ids, logprobs, width
        )
        worst = tl.sum(tl.where(places == width - 1, to_total, 0.0), axis=0)
        is_all = (worst > best_end).to(tl.int64)  # the last one is minus infinity where fewer go on
        _take_places(
            entry, kept, from_place, with_token, with_logprob, to_total, num_children, is_all, width,
            kept_totals, kept_orders, chosen, chosen_logprobs, parents, told,
        )  # fmt: skip


@triton.jit
def _take_places(
    entry: tl.tensor,
    kept: tl.tensor,
    from_place: tl.tensor,
    with_token: tl.tensor,
    with_logprob: tl.tensor,
    to_total: tl.tensor,
    num_children: tl.tensor,
    is_all: tl.tensor,
    width: tl.tensor,
    kept_totals: tl.tensor,
    kept_orders: tl.tensor,
    chosen: tl.tensor,
    chosen_logprobs: tl.tensor,
    parents: tl.tensor,
    told: tl.tensor,
) -> None:
    """Who goes on where, and what is kept and told of it."""
    places = tl.arange(0, PLACES).to(tl.int64)
    stands = places < width
    rows = tl.load(entry + ROWS + places, mask=stands, other=0)
    lane_rows = tl.load(entry + LANE_ROWS + places, mask=stands, other=0)
    none = tl.zeros((PLACES,), tl.int64)
    is_vacant = stands & (num_children == 0)
    is_taken, tokens, new_places, new_order, new_parents = none, none, places, width + places, lane_rows
    new_totals, logprobs = tl.zeros((PLACES,), tl.float64) + float("-inf"), tl.zeros((PLACES,), tl.float32)
    for turn in range(width):
        is_turn = places == turn
        place = tl.sum(tl.where(is_turn, from_place, 0), axis=0)
        is_parent = places == place
        is_first = tl.sum(tl.where(is_parent, is_taken, 0), axis=0) == 0
        target = tl.where(is_first, place, tl.max(tl.where(is_vacant, places, -1), axis=0))
        is_target = places == target
        tokens = tl.where(is_target, tl.sum(tl.where(is_turn, with_token, 0), axis=0), tokens)
        logprobs = tl.where(is_target, tl.sum(tl.where(is_turn, with_logprob, 0.0), axis=0), logprobs)
        new_totals = tl.where(is_target, tl.sum(tl.where(is_turn, to_total, 0.0), axis=0), new_totals)
        new_parents = tl.where(is_target, tl.sum(tl.where(is_parent, lane_rows, 0), axis=0), new_parents)
        new_places = tl.where(is_target, place, new_places)
        new_order = tl.where(is_target, turn, new_order)
        is_taken = tl.where(is_target, 1, is_taken)
        is_vacant = is_vacant & (places != target)
    tl.store(kept_totals + kept, new_totals, mask=stands)
    tl.store(kept_orders + kept, new_order, mask=stands)
    tl.store(chosen + rows, tokens, mask=stands)
    tl.store(chosen_logprobs + rows, logprobs, mask=stands)
    tl.store(parents + rows, new_parents, mask=stands)
    told += rows * NUM_TOLD
    tl.store(told + PARENT, new_places, mask=stands)
    tl.store(told + STANDING, new_order, mask=stands)
    tl.store(told + IS_ALL, none + is_all, mask=stands)
    tl.store(told + TOTAL, new_totals.to(tl.int64, bitcast=True), mask=stands)


def empty_totals(max_searches: int, device: torch.device) -> Tensor:
    return torch.zeros(max_searches, PLACES.value, dtype=torch.float64, device=device)


def empty_orders(max_searches: int, device: torch.device) -> Tensor:
    return torch.zeros(max_searches, PLACES.value, dtype=torch.int64, device=device)
