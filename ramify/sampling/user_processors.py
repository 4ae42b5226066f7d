"""Callers' own logits processors: called with what a row has so far, checked, and faulty for their request alone.

A processor is a function `(token_ids, logits) -> logits` over one row: the ids of prompt and output, and a float32
tensor (vocabulary,) that is its own to change. An object with a method `process_batch(token_ids, logits)` is called
for several rows that carry it at once, as many as are worked on together, with a list of id lists and a tensor (rows,
vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ramify.engine.plan import Draw


@runtime_checkable
class BatchedLogitsProcessor(Protocol):
    """The batched form. Being callable makes it a processor; `process_batch` is what is called."""

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor: ...

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Tensor) -> Tensor: ...


class ProcessorError(Exception):
    """What a processor did wrong, in words for the request's error."""


def run_processors(logits: Tensor, draws: Sequence[Draw], role: int, faults: dict[int, str]) -> Tensor:
    """All processors of all rows, each request's in its order; they see the prompt of one track, and the output.

    faults get the row's index and what went wrong.
    """
    logits = logits.clone()
    chains = [draw.demands.params.logits_processors or () for draw in draws]
    seen = [
        [*draw.demands.prompts[role], *draw.output] if chain else [] for draw, chain in zip(draws, chains, strict=True)
    ]
    for link in range(max(map(len, chains))):
        carriers: dict[int, tuple[Any, list[int]]] = {}
        for row, chain in enumerate(chains):
            if link < len(chain) and row not in faults:
                carriers.setdefault(id(chain[link]), (chain[link], []))[1].append(row)
        for processor, rows in carriers.values():
            if isinstance(processor, BatchedLogitsProcessor):
                _run_batched(processor, logits, rows, seen, faults)
            else:
                for row in rows:
                    _run_single(processor, logits, row, seen[row], faults)
    return logits


def _run_batched(
    processor: BatchedLogitsProcessor,
    logits: Tensor,
    rows: list[int],
    seen: Sequence[list[int]],
    faults: dict[int, str],
) -> None:
    index = torch.tensor(rows, device=logits.device)
    try:
        logits[index] = _checked(processor.process_batch, [list(seen[row]) for row in rows], logits[index])
    except ProcessorError as fault:
        if len(rows) == 1:
            faults[rows[0]] = str(fault)
            return
        for row in rows:  # one by one, to find out whose fault it is
            _run_batched(processor, logits, [row], seen, faults)


def _run_single(
    processor: Callable[..., Any], logits: Tensor, row: int, seen: list[int], faults: dict[int, str]
) -> None:
    try:
        logits[row] = _checked(processor, list(seen), logits[row].clone())
    except ProcessorError as fault:
        faults[row] = str(fault)


def _checked(processor: Callable[..., Any], token_ids: Any, logits: Tensor) -> Tensor:
    shape = tuple(logits.shape)
    try:
        result = processor(token_ids, logits)
    except Exception as error:  # a caller's own function may raise anything
        raise ProcessorError(f"a logits processor failed: {type(error).__name__}: {error}") from None
    if not isinstance(result, Tensor):
        raise ProcessorError(f"a logits processor must return a tensor, got {type(result).__name__}")
    if tuple(result.shape) != shape:
        raise ProcessorError(f"a logits processor must return shape {shape}, got {tuple(result.shape)}")
    result = result.to(logits)
    if bool(result.isnan().any()) or bool((result == torch.inf).any()):
        raise ProcessorError("a logits processor returned NaN or plus infinity")
    return result
