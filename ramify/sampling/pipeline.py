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
from ramify.sampling.draw import NoiseKeys, block_noise, block_scores, choose_tokens, take_blocks
from ramify.sampling_params import SamplingParams, SamplingStrategy

ROWS_AT_ONCE = 8  # some 2 MB at a time; n = 16,384 first tokens never become one array

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
    """Draws once per entry of `draws`, from the row of logits (rows, vocabulary) that `rows` names for it.

    Whatever touches the whole vocabulary happens a few rows at a time, so that it stays in cache; noise, which does
    not, is made for all rows at once.
    """
    device, vocab_size = logits.device, logits.shape[1]
    greedy = [item.params.temperature == 0 for item in draws]
    keys = NoiseKeys.of([(item.seed, item.child, item.position) for item in draws], device)
    noise = None if all(greedy) else block_noise(keys, vocab_size)
    normalisers, best, blocks, inside = [], [], [], []
    for start in range(0, len(draws), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        raw = _take_rows(logits, rows[some])
        scores = block_scores(raw)
        normalisers.append(scores.logsumexp(-1))
        allowed = _ban_early_ends(raw, draws[some])
        if any(greedy[some]):
            best.append(allowed.argmax(-1))
        else:
            best.append(torch.zeros(raw.shape[0], dtype=torch.long, device=device))
        if noise is not None:
            filtered = _filtered(allowed, draws[some])
            if filtered is not raw:
                scores = block_scores(filtered)
            blocks.append((scores + noise[some]).argmax(-1))
            inside.append(take_blocks(filtered, blocks[-1]))
    token_ids = torch.cat(best)
    if noise is not None:
        drawn = choose_tokens(torch.cat(inside), torch.cat(blocks), keys)
        token_ids = torch.where(torch.tensor(greedy, device=device), token_ids, drawn)
    normaliser = torch.cat(normalisers)
    chosen = logits[torch.tensor(rows, device=device), token_ids]
    return Drawn(token_ids, chosen - normaliser, normaliser.isfinite())


def _take_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A view where the rows follow each other or are one and the same, else a copy."""
    first = rows[0]
    if rows == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    if rows == [first] * len(rows):
        return logits[first].expand(len(rows), -1)
    return logits[torch.tensor(rows, device=logits.device)]


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
    vocab_size = logits.shape[1]
    temperatures = [item.params.temperature or 1.0 for item in draws]
    if any(value != 1.0 for value in temperatures):
        logits = processors.temperature(logits, torch.tensor(temperatures, device=logits.device))
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
