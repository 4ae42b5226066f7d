"""What a draw reads: logits with what one pass left of them, and the numbers of its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ramify.gpu.kernels.bending import Bends
from ramify.gpu.kernels.narrowing import Cuts
from ramify.gpu.kernels.race import BlockScores, KeyWords
from ramify.gpu.mixer import row_by_row
from ramify.sampling import columns as column


class Scored(NamedTuple):
    """Logits (R, vocabulary) and what one pass left of them."""

    logits: Tensor
    scores: BlockScores


class Numbers(NamedTuple):
    """The columns of R draws."""

    integers: Tensor
    floats: Tensor

    @property
    def slots(self) -> Tensor:
        return self.integers[column.SLOT]

    @property
    def positions(self) -> Tensor:
        return self.integers[column.POSITION]

    @property
    def temperatures(self) -> Tensor:
        return self.floats[column.TEMPERATURE]

    def at(self, temperatures: Tensor) -> Numbers:
        """The same at other temperatures."""
        return Numbers(self.integers, torch.cat([temperatures[None], self.floats[1:]]))

    @property
    def bends(self) -> Bends:
        return Bends(*self.floats[column.SHAPED : column.TYPICAL_P])

    @property
    def cuts(self) -> Cuts:
        """But for limits, which rows remember."""
        unlimited = torch.full_like(self.temperatures, torch.inf)
        return Cuts(*[*self.floats[column.TYPICAL_P : column.DIVERSITY], unlimited])

    @property
    def keys(self) -> KeyWords:
        words = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.POSITION)
        return KeyWords(*(self.integers[word] for word in words))


def log_sum(masses: Tensor, *, each_alone: bool) -> Tensor:
    """(R, 1) the log-sum-exp of rows, from the logarithms (R, blocks) of what their blocks weigh."""
    if each_alone:
        return row_by_row(lambda row: row.logsumexp(-1, keepdim=True), masses)
    return masses.logsumexp(-1, keepdim=True)
