"""What "equal" means for tokens: the same, up to the first place where the reference itself was nearly undecided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ramify.sampling.draw import BLOCK, TOKEN_LEVEL, block_noise, gumbel
from tests.noise import noise_keys

MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class GreedyReport:
    """How many sequences were followed to their end, and how many left at a near-tie."""

    followed: int
    near_ties: int


def check_greedy(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> GreedyReport:
    """Asserts that each output is what greedy decoding of a transformers model gives.

    One forward pass over prompt and output: if every output token is the reference's own argmax after the tokens before
    it, then, by induction, the whole output is the reference's greedy output.
    """
    near_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([list(prompt) + list(output)])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        for place, token_id in enumerate(output):
            winner, runner_up = logits[place].topk(2).values.tolist()
            if int(logits[place].argmax()) == token_id:
                continue
            assert winner - runner_up < MARGIN, f"token {place} of {list(output)}: margin {winner - runner_up}"
            near_ties += 1
            break
    return GreedyReport(len(prompts) - near_ties, near_ties)


def race(logits: Sequence[float], key: tuple[int, int, int]) -> tuple[int, float]:
    """The winner in float64, and how narrowly it won the closer of its two races."""
    keys = noise_keys([key], torch.device("cpu"))
    blocks = [torch.tensor(logits[start : start + BLOCK]).double() for start in range(0, len(logits), BLOCK)]
    between = torch.stack([block.logsumexp(0) for block in blocks]) + block_noise(keys, len(logits))[0]
    block = int(between.argmax())
    noise = gumbel(keys, torch.tensor([[block * BLOCK]]), BLOCK, TOKEN_LEVEL)[0]
    inside = blocks[block] + noise[: len(blocks[block])]
    return block * BLOCK + int(inside.argmax()), min(_margin(between), _margin(inside))


def _margin(scores: Tensor) -> float:
    if len(scores) == 1:
        return float("inf")
    first, second = scores.topk(2).values.tolist()
    return float(first - second)
