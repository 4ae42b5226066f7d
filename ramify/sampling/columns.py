"""A draw as numbers: what names its noise, and its filters. Every sampler reads its rows from these columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.engine.demands import LARGEST, MOST_ENDS_OF_SETS
from ramify.engine.plan import Draw
from ramify.sampling.draw import noise_words, prefix_words

# Columns of the integers. TEACHER_ROW and THETA_ROW: of two models, the rows of their logits that a draw is from.
# SLOT: where a sampler of kernels keeps what the draw's controls look at, NO_SLOT if it has none.
# SET: which diverse set of the step a draw is of, NO_SET if none; DEPTH: how many of its siblings come before it.
# PREFIX_HIGH, PREFIX_LOW: a digest of the output so far, of draws without replacement.
SEED_LOW, SEED_HIGH, CHILD, POSITION, TOP_K, TEACHER_ROW, THETA_ROW, SLOT = range(8)
# LAST_ROW: of a diverse set's draw whose last token the host does not know, the row in which that was drawn.
SET, DEPTH, PREFIX_HIGH, PREFIX_LOW, LAST_ROW = range(8, 13)
REPORTED = 13  # how many of the likeliest tokens are told of
# Columns of the floats: the first three are of every row, the others of rows that ask for more rules (SHAPED: 1).
TEMPERATURE, TOP_P, MIN_P = range(3)
SHAPED, TOP_N_SIGMA, DYNATEMP_RANGE, DYNATEMP_EXPONENT, SMOOTHING = range(3, 8)
TYPICAL_P, EPSILON, ETA, TOP_A, P_LESS, XTC_PROBABILITY, XTC_THRESHOLD = range(8, 15)
DIVERSITY = 15  # what a token loses for every sibling before it that took it
FOLLOWS, READS_CODE = 16, 17  # 1: its limit follows what was drawn (mirostat); its token is read off a code
DISTINCT = 18  # 1: it is drawn without replacement
ENDS = 19  # and the columns behind it, of diverse sets: tokens that end a sibling, which float32 tells exactly
NUM_INTEGERS, NUM_FLOATS = 14, ENDS + MOST_ENDS_OF_SETS
# Of a row that asks for none of them.
NO_RULES = (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
NO_SLOT = -1
NO_SET = -1
NO_LAST_ROW = -1
NO_END = -1.0
LARGEST_COUNT = 2**31 - 1


class Columns(NamedTuple):
    """Of R draws: integers (NUM_INTEGERS, R) int64, floats (NUM_FLOATS, R) float32."""

    integers: NDArray[np.int64]
    floats: NDArray[np.float32]

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Columns:
        integers, floats = zip(*map(numbers_of, draws), strict=True)
        columns = cls(np.array(integers, dtype=np.int64).T.copy(), np.array(floats, dtype=np.float32).T.copy())
        columns.integers[[SET, DEPTH]] = places_in_sets(draws)
        columns.integers[[PREFIX_HIGH, PREFIX_LOW]] = prefixes(draws)
        return columns


def places_in_sets(draws: Sequence[Draw]) -> NDArray[np.int64]:
    """(2, R) SET and DEPTH of draws; siblings stand in the order of their numbers."""
    places = np.full((2, len(draws)), NO_SET, np.int64)
    sets: dict[str, list[int]] = {}
    for index, draw in enumerate(draws):
        if draw.demands.diversity_penalty:
            sets.setdefault(draw.request_id, []).append(index)
    for number, members in enumerate(sets.values()):
        members.sort(key=lambda index: draws[index].child)
        places[0, members] = number
        places[1, members] = np.arange(len(members))
    return places


def prefixes(draws: Sequence[Draw]) -> NDArray[np.int64]:
    """(2, R) PREFIX_HIGH and PREFIX_LOW of draws."""
    words = np.zeros((2, len(draws)), np.int64)
    for index, draw in enumerate(draws):
        if draw.demands.is_distinct:
            words[:, index] = prefix_words(draw.demands.seed, draw.output)
    return words


def numbers_of(draw: Draw) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """One row: integers and floats in the columns' order; temperature 0 is the likeliest token, top-k 0 all of them."""
    demands = draw.demands
    params = demands.params
    top_k = min(max(params.top_k, 0), LARGEST_COUNT)
    # A request of its own may be one of another's children: it draws with that child's noise.
    integers = (
        *noise_words(demands.seed, params.child + draw.child, draw.position),
        top_k,
        0,
        0,
        NO_SLOT,
        NO_SET,
        NO_SET,
        0,
        0,
        NO_LAST_ROW,
        params.logprobs or 0,
    )
    rules = NO_RULES
    if demands.is_shaped and not demands.is_greedy:
        rules = (
            1.0,
            min(params.top_n_sigma, LARGEST),
            min(params.dynatemp_range, LARGEST),
            min(params.dynatemp_exponent, LARGEST),
            min(params.smoothing_factor, LARGEST),
            params.typical_p,
            params.epsilon_cutoff,
            params.eta_cutoff,
            params.top_a,
            float(params.p_less),
            params.xtc_probability,
            params.xtc_threshold,
        )
    follows = float(params.mirostat_tau > 0 and demands.is_random)
    others = (demands.diversity_penalty, follows, float(demands.is_arithmetic), float(demands.is_distinct))
    ends = sorted(map(float, demands.end_token_ids)) if demands.is_set_by_kernels else []
    padding = [NO_END] * (MOST_ENDS_OF_SETS - len(ends))
    return integers, (demands.temperature, params.top_p, params.min_p, *rules, *others, *ends, *padding)
