"""Rules that bend a distribution and leave nothing out: pure functions of logits (R, vocabulary)."""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_temperature(logits: Tensor, temperature: Tensor, reach: Tensor, exponent: Tensor) -> Tensor:
    """(R,) temperatures between temperature - reach, for a model that is certain, and temperature + reach.

    temperature - reach + 2 * reach * (entropy / log of the number of tokens that can be drawn) ^ exponent
    """
    logprobs = logits.log_softmax(-1)
    most = num_possible(logits).clamp_min(2).float().log()
    share = (entropy(logprobs, logprobs.exp()) / most)[:, 0].clamp(0, 1) ** exponent
    return temperature - reach + 2 * reach * share


def smooth(logits: Tensor, factor: Tensor) -> Tensor:
    """Quadratic sampling: largest - factor * (largest - l)^2. The likely draw together, the unlikely fall away."""
    largest = logits.amax(-1, keepdim=True)
    return largest - factor[:, None] * (largest - logits).square()


def entropy(logprobs: Tensor, probabilities: Tensor) -> Tensor:
    """(R, 1) in nats; what cannot be drawn contributes nothing."""
    return -(logprobs.clamp_min(-1e30).mul_(probabilities)).sum(-1, keepdim=True)


def num_possible(logits: Tensor) -> Tensor:
    """(R, 1): how many tokens can be drawn."""
    if bool((logits.amin(-1) > -torch.inf).all()):  # known from one quick pass, where nothing was left out
        return torch.full((len(logits), 1), logits.shape[1], device=logits.device)
    return (logits > -torch.inf).sum(-1, keepdim=True)
