"""More ways to leave unlikely tokens out, or likely ones: pure functions from logits to logits, each a row-wise rule.

    top_n_sigma      l >= largest - n * (standard deviation of the logits)
    typical_p        the tokens whose surprise is nearest to the entropy, the fewest that together reach p
    epsilon_cutoff   probability >= epsilon
    eta_cutoff       probability >= min(eta, sqrt(eta) * exp(-entropy))
    top_a            probability >= a * (the largest probability)^2
    p_less           probability >= the sum of all squared probabilities
    mirostat         surprise in bits <= limit, where the limit follows what was drawn
    xtc              of all that reach the threshold, only the least likely

Probabilities and entropies are those of what is left when a rule's turn comes. Logits are (R, vocabulary), what rows
ask for (R,). The likeliest token always stays (but for xtc, whose point is to remove it), and so do ties at a border.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_n_sigma(logits: Tensor, n: Tensor) -> Tensor:
    """Temperature scales deviations and distances alike, so this cut does not depend on it."""
    below = logits - logits.amax(-1, keepdim=True)
    possible = below > -torch.inf
    count = possible.sum(-1, keepdim=True)
    counted = below.masked_fill(~possible, 0.0)
    mean = counted.sum(-1, keepdim=True) / count
    variance = (counted - mean).square().masked_fill_(~possible, 0.0).sum(-1, keepdim=True) / count
    return logits.masked_fill(below < -n[:, None] * variance.sqrt(), -torch.inf)


def typical_p(logits: Tensor, p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022, https://arxiv.org/abs/2202.00666)."""
    logprobs = logits.log_softmax(-1)
    distance = (_entropy(logprobs)[:, None] + logprobs).abs()  # of a surprise, -logprob, from its mean
    order = distance.sort(dim=-1)
    reached = logprobs.gather(1, order.indices).exp().cumsum(-1, dtype=torch.float64)
    last = (reached < p[:, None]).sum(-1, keepdim=True).clamp_max(logits.shape[1] - 1)
    return logits.masked_fill(distance > order.values.gather(1, last), -torch.inf)


def epsilon_cutoff(logits: Tensor, epsilon: Tensor) -> Tensor:
    """Hewitt et al. 2022, https://arxiv.org/abs/2210.15191."""
    return _at_least(logits, epsilon.log())


def eta_cutoff(logits: Tensor, eta: Tensor) -> Tensor:
    """Of the same paper: where the model is unsure, less is asked for."""
    entropy = _entropy(logits.log_softmax(-1))
    return _at_least(logits, torch.minimum(eta.log(), 0.5 * eta.log() - entropy))


def top_a(logits: Tensor, a: Tensor) -> Tensor:
    """The surer the model, the more is cut: the threshold is a times the square of the largest probability."""
    likeliest = logits.log_softmax(-1).amax(-1)
    return _at_least(logits, a.log() + 2 * likeliest)


def p_less(logits: Tensor) -> Tensor:
    """p-less sampling (https://arxiv.org/abs/2509.23234): at least the probability that two draws would agree."""
    return _at_least(logits, (2 * logits.log_softmax(-1)).logsumexp(-1))


def mirostat(logits: Tensor, limit: Tensor) -> Tensor:
    """The cut of mirostat, version 2 (Basu et al. 2021, https://arxiv.org/abs/2007.14966): limits are in bits."""
    return _at_least(logits, -limit * math.log(2))


def xtc(logits: Tensor, threshold: Tensor) -> Tensor:
    """Exclude top choices: if several tokens reach the threshold, all but the least likely of them go."""
    logprobs = logits.log_softmax(-1)
    reaches = (logprobs >= threshold.log()[:, None]) & (logprobs > -torch.inf)  # a threshold of 0 is reached by all
    least = logprobs.masked_fill(~reaches, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logprobs > least, -torch.inf)


def _entropy(logprobs: Tensor) -> Tensor:
    """(R,) in nats; what cannot be drawn contributes nothing."""
    return -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(-1)


def _at_least(logits: Tensor, smallest: Tensor) -> Tensor:
    """Only what has at least this logprob (R,) stays, and the likeliest."""
    logprobs = logits.log_softmax(-1)
    floor = torch.minimum(smallest[:, None], logprobs.amax(-1, keepdim=True))
    return logits.masked_fill(logprobs < floor, -torch.inf)
