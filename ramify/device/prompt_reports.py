"""What a step tells of given tokens: their logprobs, ranks and likeliest alternatives, by one model or by two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.device.lane import Lane
from ramify.device.reads import Int64s
from ramify.device.sampler_kernels import SamplerKernels
from ramify.engine.plan import Comparison, PromptReport, Row, TokenReport
from ramify.sampling.token_reports import report

ROWS_AT_ONCE = 64  # what is needed of the vocabulary at a time


class Told(NamedTuple):
    """For each of the asked, one report per target; and for those asked about two models, how they compare."""

    reports: list[list[TokenReport]]
    comparisons: dict[int, list[Comparison]]


def rows_asked(lanes: Sequence[Lane], first: Row, count: int) -> Int64s:
    """Where so many rows stand in their lane."""
    start = int(lanes[first.model].rows_of([first])[0])
    return np.arange(start, start + count)


def report_prompts(
    lanes: Sequence[Lane],
    asked: Sequence[PromptReport],
    *,
    batch_invariant: bool,
    kernels: SamplerKernels | None = None,
) -> Told:
    """A few rows at a time, whosever they are: a prompt's logits may be larger than the model, and the head's product
    costs about the same for one row as for many.

    torch's operators sum in an order that follows from the number of rows: invariant, rows that kernels cannot tell
    of come one at a time.
    """
    told = Told([[] for _ in asked], {index: [] for index, each in enumerate(asked) if each.second is not None})
    alike: dict[tuple[tuple[int, ...], bool], list[int]] = {}  # by the models that are asked, and by who tells
    for index, each in enumerate(asked):
        models = tuple(row.model for row in each.rows())
        most = kernels.most_reported if batch_invariant and kernels is not None and len(models) == 1 else -1
        alike.setdefault((models, _count_of(each) <= most), []).append(index)
    for (models, by_kernels), indices in alike.items():
        owners = np.repeat(indices, [len(asked[index].targets) for index in indices])
        targets = [target for index in indices for target in asked[index].targets]
        begun = [(asked[index].rows(), len(asked[index].targets)) for index in indices]
        columns = [
            np.concatenate([rows_asked(lanes, firsts[role], count) for firsts, count in begun])
            for role in range(len(models))
        ]
        for start in range(0, len(targets), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            logits = [lanes[model].logits(rows[some]) for model, rows in zip(models, columns, strict=True)]
            chosen = torch.tensor(targets[some], device=logits[0].device)
            if by_kernels:
                assert kernels is not None
                counts = [_count_of(asked[owner]) for owner in owners[some]]
                for owner, count, own in zip(
                    owners[some], counts, kernels.tell(logits[0], chosen, max(counts)), strict=True
                ):
                    told.reports[owner].append(own.first(count))
                continue
            step = 1 if batch_invariant else ROWS_AT_ONCE
            for row in range(0, len(chosen), step):
                few = slice(row, row + step)
                few_logits = [each[few].clone() for each in logits]
                _tell(told, asked, owners[some][few].tolist(), few_logits, chosen[few, None])
    return told


def _count_of(asked: PromptReport) -> int:
    return asked.demands.params.prompt_logprobs or 0


def _tell(
    told: Told, asked: Sequence[PromptReport], owners: Sequence[int], logits: Sequence[Tensor], targets: Tensor
) -> None:
    """Of a few rows (R, vocabulary) of each model, and their targets (R, 1), to those who asked."""
    counts = [_count_of(asked[owner]) for owner in owners]
    if len(logits) == 1:
        for owner, count, [own] in zip(owners, counts, report(logits[0], targets, max(counts)), strict=True):
            told.reports[owner].append(own.first(count))
        return
    vocab_size = min(each.shape[1] for each in logits)  # what only one model has is no token of both
    first, second = (each[:, :vocab_size] for each in logits)
    forward, reverse = divergences(first, second)
    by_first, by_second = (report(each, targets, max(counts)) for each in (first, second))
    for row, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        told.reports[owner].append(by_first[row][0].first(count))
        told.comparisons[owner].append(Comparison(by_second[row][0].first(count), forward[row], reverse[row]))


def divergences(first: Tensor, second: Tensor) -> tuple[list[float], list[float]]:
    """KL(first || second) and KL(second || first) of two models' logits (R, vocabulary), row by row."""
    p, q = first.double().log_softmax(-1), second.double().log_softmax(-1)

    def divergence(left: Tensor, right: Tensor) -> list[float]:
        mass = left.exp()
        terms = torch.where(mass > 0, mass * (left - right), 0.0)  # what one cannot draw says nothing of the other
        return terms.sum(-1).clamp(min=0).tolist()

    return divergence(p, q), divergence(q, p)
