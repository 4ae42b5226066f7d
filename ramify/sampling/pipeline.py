"""From raw logits to drawn tokens, in one order:

1. raw logprobs are the model's own           4. top-k
2. min_tokens bans what would end too early   5. top-p, measured on what top-k left
3. temperature                                6. min-p, measured on what top-p left   7. the draw

Greedy rows take the largest logit after step 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.errors import UnsupportedError
from ramify.plan import Draw
from ramify.sampling import processors
from ramify.sampling.draw import NoiseKeys, draw
from ramify.sampling_params import SamplingParams, SamplingStrategy

ROWS_AT_ONCE = 64  # vocabulary-wide work stays in cache, and n = 16,384 first tokens never become one array

Filter = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Drawn:
    """(R,) each: the token, its logprob by the model's own distribution, and whether the row was sound."""

    token_ids: Tensor
    logprobs: Tensor
    sound: Tensor


def check_supported(params: SamplingParams) -> None:
    """Refuses by name what this version cannot do, rather than ignore it."""
    neutral = SamplingParams()
    for name in (
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logits_processors",
    ):
        if getattr(params, name) not in (getattr(neutral, name), (), {}):
            raise UnsupportedError(f"{name} is not supported by this version, got {getattr(params, name)!r}")
    if params.resolved_strategy in (SamplingStrategy.BEAM_SEARCH, SamplingStrategy.DIVERSE):
        raise UnsupportedError(f"strategy {params.resolved_strategy.value!r} is not supported by this version")


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Drawn:
    """Draws once per entry of `draws`, from the row of logits (rows, vocabulary) that `rows` names for it."""
    parts = []
    for start in range(0, len(draws), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        index = torch.tensor(rows[some], device=logits.device)
        parts.append(_sample_rows(logits[index], draws[some]))
    return Drawn(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.sound for part in parts]),
    )


def _sample_rows(logits: Tensor, draws: Sequence[Draw]) -> Drawn:
    normaliser = logits.logsumexp(-1)
    processed = _ban_early_ends(logits, draws)
    greedy = [item.params.temperature == 0 for item in draws]
    if all(greedy):
        token_ids = processed.argmax(-1)
    else:
        keys = NoiseKeys.of([(item.seed, item.child, item.position) for item in draws], logits.device)
        token_ids = draw(_filtered(processed, draws), keys)
        if any(greedy):
            token_ids = torch.where(torch.tensor(greedy, device=logits.device), processed.argmax(-1), token_ids)
    logprobs = logits.gather(1, token_ids[:, None])[:, 0] - normaliser
    return Drawn(token_ids, logprobs, normaliser.isfinite())


def _ban_early_ends(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    banned = [
        (row, token_id)
        for row, item in enumerate(draws)
        if item.position < item.params.min_tokens
        for token_id in item.end_token_ids
    ]
    if not banned:
        return logits
    rows, token_ids = torch.tensor(banned, device=logits.device).unbind(1)
    return processors.ban(logits, rows, token_ids)


def _filtered(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Temperature and filters; a filter touches only the rows that ask for it."""
    device = logits.device
    vocab_size = logits.shape[1]
    temperatures = torch.tensor([item.params.temperature or 1.0 for item in draws], device=device)
    logits = processors.temperature(logits, temperatures)
    counts = [min(item.params.top_k, vocab_size) if item.params.top_k > 0 else vocab_size for item in draws]
    logits = _on_rows(processors.top_k, logits, counts, vocab_size)
    logits = _on_rows(processors.top_p, logits, [item.params.top_p for item in draws], 1.0)
    return _on_rows(processors.min_p, logits, [item.params.min_p for item in draws], 0.0)


def _on_rows(rule: Filter, logits: Tensor, values: Sequence[float], neutral: float) -> Tensor:
    rows = [row for row, value in enumerate(values) if value != neutral]
    if not rows:
        return logits
    chosen = torch.tensor([values[row] for row in rows], device=logits.device)
    if len(rows) == len(values):
        return rule(logits, chosen)
    index = torch.tensor(rows, device=logits.device)
    return logits.index_copy(0, index, rule(logits[index], chosen))
