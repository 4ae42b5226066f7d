"""Logprobs as reported: of given tokens, with their ranks, and of the likeliest, without a log-softmax in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.engine.plan import TokenReport


def ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Rank of each token (R, m) in its row of logits (R, vocabulary), from 1; tokens that tie share the best rank."""
    chosen = logits.gather(1, token_ids)
    larger = [(logits > chosen[:, index, None]).sum(-1) for index in range(token_ids.shape[1])]
    return torch.stack(larger, dim=1) + 1


def report(logits: Tensor, token_ids: Tensor, count: int, normaliser: Tensor | None = None) -> list[list[TokenReport]]:
    """Of every row of logits (R, vocabulary): its tokens (R, m), each beside the row's `count` likeliest."""
    if normaliser is None:
        normaliser = logits.logsumexp(-1)
    logprobs = (logits.gather(1, token_ids) - normaliser[:, None]).tolist()
    ranked = ranks(logits, token_ids).tolist()
    top = logits.topk(min(count, logits.shape[1]), dim=-1)
    top_ids = top.indices.cpu().numpy()
    top_logprobs = (top.values - normaliser[:, None]).cpu().numpy()
    return [
        [
            TokenReport(logprob, rank, top_ids[row], top_logprobs[row])
            for logprob, rank in zip(logprobs[row], ranked[row], strict=True)
        ]
        for row in range(logits.shape[0])
    ]
