"""What the sampler asks of whole rows, by torch's operators; a device may have something faster.

It may also take several tasks at a time, each a few rows on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from ramify.sampling.draw import NoiseKeys, block_scores, gumbel
from ramify.sampling.filters import Filters, crossing, ranked_floors

T = TypeVar("T")


class Task(NamedTuple, Generic[T]):
    """is_bound: to the thread that asks for it, since it runs what callers brought."""

    process: Callable[[], T]
    is_bound: bool


class Operators:
    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return [task.process() for task in tasks]

    def gumbel(self, keys: NoiseKeys, first: Tensor, count: int, level: int) -> Tensor:
        """(R, count): noise for ids first .. first + count of each row; first (R, 1) is a multiple of 4."""
        return gumbel(keys, first, count, level)

    def block_scores(self, logits: Tensor) -> Tensor:
        """(R, vocabulary) -> (R, blocks): the log-sum-exp of every block of the draw's first level."""
        return block_scores(logits)

    def ranked_floors(self, logits: Tensor, asked: Filters) -> Tensor:
        """(R, 1): the smallest logit that top-k and top-p leave."""
        return ranked_floors(logits, asked)

    def crossing(self, keys: Tensor, weights: Tensor, share: Tensor) -> Tensor:
        """(R, 1): of each row's keys (R, N), the largest such that it and all larger have this share of the weights."""
        return crossing(keys, weights, share)
