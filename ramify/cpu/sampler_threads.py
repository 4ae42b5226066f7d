"""The sampler's pieces on several threads, each of which keeps torch's operators to itself.

torch would share every operator among threads of its own, which keep spinning for some milliseconds afterwards. While
they do, they take the cores from the kernels' helpers, and the next step's products wait. Here a thread takes whole
pieces, and sleeps when there are none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from ramify.cpu.library import Library
from ramify.sampling.operators import Task

T = TypeVar("T")


class SamplerThreads:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._executor: ThreadPoolExecutor | None = None
        self._are_at_work = False

    @property
    def for_a_call(self) -> int:
        """How many threads a kernel may use that a task calls: while several tasks are at work, each has one."""
        return 1 if self._are_at_work else self._library.threads

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """Called where torch keeps to the calling thread, which does its own part."""
        num_helpers = min(self._library.threads, len(tasks)) - 1
        if num_helpers < 1:
            return [task.process() for task in tasks]
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._library.threads - 1, "ramify-sampler", self._begin)
        done: dict[int, T] = {}
        bound = deque(number for number, task in enumerate(tasks) if task.is_bound)
        shared = deque(number for number, task in enumerate(tasks) if not task.is_bound)

        @torch.inference_mode()
        def take(numbers: deque[int]) -> None:
            while numbers:
                try:
                    number = numbers.popleft()
                except IndexError:  # somebody else took the last
                    return
                done[number] = tasks[number].process()

        self._are_at_work = True
        helping = [self._executor.submit(take, shared) for _ in range(num_helpers)]
        try:
            take(bound)
            take(shared)
        finally:  # nobody is at work on a step that is over; who has not begun is not waited for
            shared.clear()
            begun = [future for future in helping if not future.cancel()]
            wait(begun)
            self._are_at_work = False
        for future in begun:
            future.result()
        return [done[number] for number in range(len(tasks))]

    def _begin(self) -> None:
        self._library.keep_torch_on_this_thread()
