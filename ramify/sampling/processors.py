"""Pure functions from logits to logits, each a row-wise rule. Minus infinity means: cannot be drawn."""

from __future__ import annotations

import torch
from torch import Tensor


def ban(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Row rows[i] may not draw token_ids[i]."""
    return logits.index_put((rows, token_ids), torch.tensor(-torch.inf, device=logits.device))


def temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Divides each row by its temperature (R,). The row's maximum becomes 0 first, so no temperature overflows."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted / temperatures.clamp_min(1e-38)[:, None]


def top_k(logits: Tensor, counts: Tensor) -> Tensor:
    """Keeps the k largest of each row (counts (R,), at least 1); what ties with the k-th stays too."""
    largest = logits.topk(min(int(counts.max()), logits.shape[1]), dim=-1).values
    kth = largest.gather(1, counts.clamp_max(largest.shape[1])[:, None] - 1)
    return logits.masked_fill(logits < kth, -torch.inf)


def top_p(logits: Tensor, masses: Tensor) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose mass reaches p (masses (R,)), ties at its border included."""
    ordered = logits.sort(dim=-1, descending=True).values
    reached = ordered.softmax(-1).cumsum(-1, dtype=torch.float64)
    crossing = (reached < masses[:, None]).sum(-1, keepdim=True).clamp_max(logits.shape[1] - 1)
    return logits.masked_fill(logits < ordered.gather(1, crossing), -torch.inf)


def min_p(logits: Tensor, shares: Tensor) -> Tensor:
    """Keeps tokens at least `shares` (R,) times as likely as the likeliest."""
    floor = logits.amax(-1, keepdim=True) + shares.log()[:, None]
    return logits.masked_fill(logits < floor, -torch.inf)
