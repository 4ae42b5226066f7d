"""What filters leave of a distribution: how much of its mass, and which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.outputs import Kept


@dataclass(frozen=True, slots=True)
class Remaining:
    masses: list[float]  # (R)
    mask: Tensor  # (R, vocabulary) what can be drawn

    @classmethod
    def of(cls, uncut: Tensor, cut: Tensor, is_greedy: Tensor, best: Tensor) -> Remaining:
        """Of logits (R, vocabulary) before and after what cuts; of a greedy row only the best (R,) is left."""
        mask = cut > -torch.inf
        if bool(is_greedy.any()):
            alone = torch.zeros_like(mask).scatter(1, best[:, None], True)
            mask = torch.where(is_greedy[:, None], alone, mask)
        logits = uncut.double()
        inside = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
        masses = (inside - logits.logsumexp(-1)).exp().clamp(max=1)
        return cls(masses.tolist(), mask)

    def kept(self, row: int, *, with_ids: bool) -> Kept:
        token_ids = tuple(self.mask[row].nonzero()[:, 0].tolist()) if with_ids else None
        return Kept(self.masses[row], token_ids)
