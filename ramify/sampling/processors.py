"""Controls: pure functions from logits to logits, each a row-wise rule. Minus infinity means: cannot be drawn.

Rules that touch single tokens take them as (rows, token_ids) index tensors of one length, so that their cost is that of
the tokens named and not of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ban(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Row rows[i] may not draw token_ids[i]."""
    return logits.index_put((rows, token_ids), logits.new_tensor(-torch.inf))


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Rows that are named may draw only the tokens they are named with."""
    # Pairs are many: each marks its row, and the rows are filled once.
    marked = logits.new_zeros(len(logits), 1).index_fill_(0, rows, -torch.inf)
    allowed = logits + marked
    return allowed.index_put_((rows, token_ids), logits[rows, token_ids])


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> Tensor:
    return logits.index_put((rows, token_ids), biases, accumulate=True)


def penalise_repetition(logits: Tensor, rows: Tensor, token_ids: Tensor, penalties: Tensor) -> Tensor:
    """What was seen in prompt or output: positive logits are divided by the penalty, others multiplied.

    (rows[i], token_ids[i]) are distinct; penalties[i] is that row's.
    """
    seen = logits[rows, token_ids]
    return logits.index_put((rows, token_ids), torch.where(seen > 0, seen / penalties, seen * penalties))


def penalise_frequency(
    logits: Tensor, rows: Tensor, token_ids: Tensor, *, counts: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """What the output has: minus frequency times how often, minus presence once. Pairs are distinct."""
    return logits.index_put((rows, token_ids), -(counts * frequency + presence), accumulate=True)


def temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Divides each row by its temperature (R,). The row's maximum becomes 0 first, so no temperature overflows.

    A row at 1 keeps its very bits: what is drawn from it must not depend on who stands beside it.
    """
    shift = torch.where(temperatures == 1, 0.0, logits.amax(-1))
    return (logits - shift[:, None]).div_(temperatures.clamp_min(1e-38)[:, None])
