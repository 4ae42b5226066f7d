"""A draw as numbers: what names its noise, and its filters. Every sampler reads its rows from these columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.engine.plan import Draw
from ramify.sampling.draw import noise_words

# Columns of the integers. TEACHER_ROW and THETA_ROW: of two models, the rows of their logits that a draw is from.
# SLOT: where a sampler of kernels keeps what the draw's controls look at, NO_SLOT if it has none.
SEED_LOW, SEED_HIGH, CHILD, POSITION, TOP_K, TEACHER_ROW, THETA_ROW, SLOT = range(8)
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_INTEGERS, NUM_FLOATS = 8, 3
NO_SLOT = -1
LARGEST_COUNT = 2**31 - 1


class Columns(NamedTuple):
    """Of R draws: integers (NUM_INTEGERS, R) int64, floats (NUM_FLOATS, R) float32."""

    integers: NDArray[np.int64]
    floats: NDArray[np.float32]

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Columns:
        integers, floats = zip(*map(numbers_of, draws), strict=True)
        return cls(np.array(integers, dtype=np.int64).T.copy(), np.array(floats, dtype=np.float32).T.copy())


def numbers_of(draw: Draw) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """One row: integers and floats in the columns' order; temperature 0 is the likeliest token, top-k 0 all of them."""
    demands = draw.demands
    params = demands.params
    top_k = min(max(params.top_k, 0), LARGEST_COUNT)
    # A request of its own may be one of another's children: it draws with that child's noise.
    integers = (*noise_words(demands.seed, params.child + draw.child, draw.position), top_k, 0, 0, NO_SLOT)
    return integers, (demands.temperature, params.top_p, params.min_p)
