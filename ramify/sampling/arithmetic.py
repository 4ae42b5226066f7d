"""Arithmetic sampling (Vilnis et al. 2023, https://arxiv.org/abs/2210.15458): children read their tokens off codes.

The n codes of a request are evenly spread over 0 .. 1 and shifted together at random, so each alone is uniform. A token
owns the part of 0 .. 1 between the sums of the probabilities before it and up to it; a code draws the token that it
falls into, and what it is inside that part, stretched to 0 .. 1 again, is the code for the next one. So every child is
an exact sample, and together they cover the distribution more evenly than independent ones.

A float64 has 53 bits, and every token uses some up: before they are short, new ones are added from the child's own
keyed noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ramify.engine.plan import Draw
from ramify.sampling.draw import CODE_LEVEL, WORD_STEP, coin

SHORT = 2.0**-40  # a code that is only known to within more than this gets new bits
FINEST = 2.0**-53  # what a float64 can tell apart just below 1
LARGEST_CODE = 1.0 - FINEST
LEAST_SHARE = 1e-300


class Code(NamedTuple):
    """Where a child stands in 0 .. 1, and what is not known of it: it lies between value and value + step."""

    value: float
    step: float


def first_code(draw: Draw) -> Code:
    params = draw.demands.params
    shift = coin(draw.demands.seed, 0, 0, CODE_LEVEL)
    return Code((shift + draw.child / params.n) % 1.0, WORD_STEP)


def refilled(code: Code, draw: Draw) -> Code:
    """With new bits where they are short."""
    if code.step <= SHORT:
        return code
    # Position 0 of child 0 is the shift's.
    bits = coin(draw.demands.seed, draw.child, draw.position + 1, CODE_LEVEL)
    return Code(min(code.value + bits * code.step, LARGEST_CODE), max(code.step * WORD_STEP, FINEST))


def read(logits: Tensor, codes: list[Code]) -> tuple[list[int], list[Code]]:
    """The tokens that codes fall into by softmax of logits (R, vocabulary), and the codes for the next ones."""
    probabilities = logits.softmax(-1, dtype=torch.float64)
    ends = probabilities.cumsum(-1)
    wanted = torch.tensor([code.value for code in codes], dtype=torch.float64, device=logits.device)[:, None]
    # Sums may end a little off 1: codes are stretched to what they really reach.
    wanted = wanted * ends[:, -1:]
    tokens = torch.searchsorted(ends, wanted, right=True).clamp_max(logits.shape[1] - 1)
    own = probabilities.gather(1, tokens)
    if bool((own == 0).any()):  # rounding put a code behind the last that can be drawn
        possible = (probabilities > 0) * torch.arange(logits.shape[1], device=logits.device)
        tokens = torch.minimum(tokens, possible.amax(-1, keepdim=True))
        own = probabilities.gather(1, tokens)
    inside = ((wanted - (ends.gather(1, tokens) - own)) / own).clamp(0.0, LARGEST_CODE)
    following = [
        Code(value, code.step / max(share, LEAST_SHARE))
        for code, value, share in zip(codes, inside[:, 0].tolist(), own[:, 0].tolist(), strict=True)
    ]
    return tokens[:, 0].tolist(), following
