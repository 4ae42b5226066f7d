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
ask for (R,). The likeliest token always stays (but under typical_p, whose most typical stays, and xtc, whose point is
to remove it), and so do ties at a border.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ramify.sampling import filters
from ramify.sampling.filters import cut
from ramify.sampling.shaping import entropy, num_possible


def top_n_sigma(logits: Tensor, n: Tensor) -> Tensor:
    """Temperature scales deviations and distances alike, so this cut does not depend on it."""
    below = logits - logits.amax(-1, keepdim=True)
    return cut(below, -n[:, None] * _deviation(below)).add_(logits)


def typical_p(
    logits: Tensor, p: Tensor, crossing: Callable[[Tensor, Tensor, Tensor], Tensor] = filters.crossing
) -> Tensor:
    """Locally typical sampling (Meister et al. 2022, https://arxiv.org/abs/2202.00666)."""
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp()
    # How near a surprise, -logprob, is to its mean: 0 is nearest.
    nearness = (entropy(logprobs, probabilities) + logprobs).abs_().neg_()
    return cut(nearness, crossing(nearness, probabilities, p)).add_(logits)


def epsilon_cutoff(logits: Tensor, epsilon: Tensor) -> Tensor:
    """Hewitt et al. 2022, https://arxiv.org/abs/2210.15191."""
    return _at_least(logits, logits.log_softmax(-1), epsilon.log()[:, None])


def eta_cutoff(logits: Tensor, eta: Tensor) -> Tensor:
    """Of the same paper: where the model is unsure, less is asked for."""
    logprobs = logits.log_softmax(-1)
    limit = eta.log()[:, None]
    return _at_least(logits, logprobs, torch.minimum(limit, 0.5 * limit - entropy(logprobs, logprobs.exp())))


def top_a(logits: Tensor, a: Tensor) -> Tensor:
    """The surer the model, the more is cut: the threshold is a times the square of the largest probability."""
    logprobs = logits.log_softmax(-1)
    return _at_least(logits, logprobs, a.log()[:, None] + 2 * logprobs.amax(-1, keepdim=True))


def p_less(logits: Tensor) -> Tensor:
    """p-less sampling (https://arxiv.org/abs/2509.23234): at least the probability that two draws would agree."""
    logprobs = logits.log_softmax(-1)
    return _at_least(logits, logprobs, logprobs.exp().square_().sum(-1, keepdim=True).log_())


def mirostat(logits: Tensor, limit: Tensor) -> Tensor:
    """The cut of mirostat, version 2 (Basu et al. 2021, https://arxiv.org/abs/2007.14966): limits are in bits."""
    return _at_least(logits, logits.log_softmax(-1), -limit[:, None] * math.log(2))


def xtc(logits: Tensor, threshold: Tensor) -> Tensor:
    """Exclude top choices: if several tokens reach the threshold, all but the least likely of them go."""
    logprobs = logits.log_softmax(-1)
    # Whatever does not reach the threshold, or cannot be drawn, is as far from being the least likely as can be.
    reaching = (logprobs - cut(logprobs, threshold.log()[:, None])).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = reaching.amin(-1, keepdim=True)
    return cut(-logprobs, -least).add_(logits)


def _deviation(below: Tensor) -> Tensor:
    """(R, 1): the standard deviation of what can be drawn."""
    count = num_possible(below)
    if bool((count == below.shape[1]).all()):  # nothing to step over
        return (below - below.sum(-1, keepdim=True) / count).square_().sum(-1, keepdim=True).div_(count).sqrt_()
    possible = below > -torch.inf
    mean = below.masked_fill(~possible, 0.0).sum(-1, keepdim=True) / count
    return ((below - mean).square_().masked_fill_(~possible, 0.0).sum(-1, keepdim=True) / count).sqrt_()


def _at_least(logits: Tensor, logprobs: Tensor, smallest: Tensor) -> Tensor:
    """Only what has at least this logprob (R, 1) stays, and the likeliest."""
    floor = torch.minimum(smallest, logprobs.amax(-1, keepdim=True))
    return cut(logprobs, floor).add_(logits)
