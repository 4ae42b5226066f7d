"""The sampler's passes over whole rows by kernels (logits.cpp, noise.cpp), and its tasks on several threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ramify.cpu.library import Library, floats
from ramify.cpu.sampler_threads import SamplerThreads
from ramify.sampling.draw import BLOCK, NoiseKeys
from ramify.sampling.filters import Filters
from ramify.sampling.operators import Operators, Task

T = TypeVar("T")


class CpuOperators(Operators):
    def __init__(self, library: Library) -> None:
        self._library, self._threads = library, SamplerThreads(library)

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return self._threads.run(tasks)

    def gumbel(self, keys: NoiseKeys, first: Tensor, count: int, level: int) -> Tensor:
        words = [word.contiguous() for word in (keys.seed_low, keys.seed_high, keys.child, keys.position, first)]
        rows = len(first)
        noise = floats(rows, count)
        self._library.gumbel(
            *(word.data_ptr() for word in words), level, noise.data_ptr(), rows, count, self._threads.for_a_call
        )
        return noise

    def block_scores(self, logits: Tensor) -> Tensor:
        logits = _in_rows(logits)
        rows, vocab_size = logits.shape
        scores = logits.new_empty(rows, -(-vocab_size // BLOCK))
        self._library.block_scores(
            logits.data_ptr(), logits.stride(0), scores.data_ptr(), rows, vocab_size, self._threads.for_a_call
        )
        return scores

    def ranked_floors(self, logits: Tensor, asked: Filters) -> Tensor:
        logits = _in_rows(logits)
        rows, vocab_size = logits.shape
        top_k, top_p = asked.top_k, asked.top_p
        if top_k is None:
            top_k = torch.full((rows,), vocab_size, device=logits.device)
        if top_p is None:
            top_p = logits.new_ones(rows)
        top_k, top_p = top_k.contiguous(), top_p.contiguous()
        floors = logits.new_empty(rows, 1)
        self._library.ranked_floors(
            logits.data_ptr(),
            logits.stride(0),
            top_k.data_ptr(),
            top_p.data_ptr(),
            floors.data_ptr(),
            rows,
            vocab_size,
            self._threads.for_a_call,
        )
        return floors

    def crossing(self, keys: Tensor, weights: Tensor, share: Tensor) -> Tensor:
        keys, weights, share = keys.contiguous(), weights.contiguous(), share.contiguous()
        rows, count = keys.shape
        found = keys.new_empty(rows, 1)
        self._library.crossings(
            keys.data_ptr(),
            weights.data_ptr(),
            share.data_ptr(),
            found.data_ptr(),
            rows,
            count,
            self._threads.for_a_call,
        )
        return found

    def mix(
        self,
        theta: Tensor,
        teacher: Tensor,
        forced: Tensor,
        *,
        method: int,
        given: float,
        bounds: tuple[float, float],
        num_numbers: int,
    ) -> tuple[Tensor, Tensor]:
        """log q* (R, vocabulary), and what is told of each row (R, num_numbers) float64; see mixture.cpp."""
        theta, teacher, forced = _in_rows(theta), _in_rows(teacher), forced.contiguous()
        rows, vocab_size = theta.shape
        threads = min(self._threads.for_a_call, rows)
        logits = theta.new_empty(rows, vocab_size)
        numbers = theta.new_empty(rows, num_numbers, dtype=torch.float64)
        scratch = theta.new_empty(threads, self._library.mixture_scratch(vocab_size))
        self._library.mix_rows(
            theta.data_ptr(),
            theta.stride(0),
            teacher.data_ptr(),
            teacher.stride(0),
            forced.data_ptr(),
            method,
            given,
            *bounds,
            logits.data_ptr(),
            numbers.data_ptr(),
            scratch.data_ptr(),
            rows,
            vocab_size,
            threads,
        )
        return logits, numbers


def _in_rows(logits: Tensor) -> Tensor:
    """Rows may lie anywhere, or be one and the same; the numbers of a row lie side by side."""
    assert logits.dtype == torch.float32, "logits are float32"
    return logits if logits.stride(1) == 1 else logits.contiguous()
