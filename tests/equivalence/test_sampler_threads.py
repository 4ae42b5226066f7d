"""The sampler's pieces on several threads: the same results, callers' own code on their thread, faults told."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify import SamplingParams
from ramify.cpu.instructions import NATIVE
from ramify.cpu.library import Library
from ramify.cpu.sampler_threads import SamplerThreads
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw, StepResult
from ramify.sampling.operators import Operators, Task
from ramify.sampling.piece import Piece
from ramify.sampling.pipeline import Sampler, Source
from tests.native import library_for, needs_compiler

pytestmark = needs_compiler

T = TypeVar("T")
VOCABULARY, ROWS = 1_500, 43
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "logprobs": 4},
    {"temperature": 2.0, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"typical_p": 0.8},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    {"allowed_token_ids": [3, 5, 700]},
    {"mirostat_tau": 3.0},
    {"strategy": "arithmetic", "n": 8},
]


@pytest.fixture(scope="module")
def library() -> Library:
    return library_for(NATIVE)


class Shared(Operators):
    """Torch's operators, on threads."""

    def __init__(self, threads: SamplerThreads) -> None:
        self._threads = threads

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return self._threads.run(tasks)


@pytest.fixture
def threads(library: Library, monkeypatch: pytest.MonkeyPatch) -> SamplerThreads:
    """Three, however many cores this machine has."""
    monkeypatch.setattr(Library, "threads", 3)
    return SamplerThreads(library)


def _draws(seed: int, step: int, **more: Any) -> list[Draw]:
    numbers = random.Random(seed)
    ways = [SamplingParams(**{"seed": number, **numbers.choice(WAYS), **more}) for number in range(ROWS)]
    demands = [Demands(way, prompts=([1, 2, number],)) for number, way in enumerate(ways)]
    return [Draw(str(row), 0, row % 8, step, (), each, (4, 9)[:step]) for row, each in enumerate(demands)]


def _told(result: StepResult) -> list[object]:
    """All of it, comparable."""
    reports = {
        row: [each.tolist() if isinstance(each, np.ndarray) else each for each in (*report, *(report.processed or ()))]
        for row, report in result.reports.items()
    }
    return [result.token_ids, result.logprobs, result.faults, repr(reports)]


def _sample(sampler: Sampler, seed: int, draws: list[Draw]) -> StepResult:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    return sampler.sample([Source(logits, range(ROWS))], draws)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_is_drawn_and_told(threads: SamplerThreads, seed: int) -> None:
    in_turn, shared = Sampler("both"), Sampler("both")
    shared.operators = Shared(threads)
    by_step = [_draws(seed, step) for step in range(3)]
    for step in (1, 2):  # what draws remember goes by their demands
        by_step[step] = [
            after._replace(demands=first.demands) for first, after in zip(by_step[0], by_step[step], strict=True)
        ]
    alone = [_sample(in_turn, seed + step, draws) for step, draws in enumerate(by_step)]
    together = [_sample(shared, seed + step, draws) for step, draws in enumerate(by_step)]
    assert [_told(result) for result in together] == [_told(result) for result in alone]


def test_callers_processors_run_on_the_thread_that_asks(threads: SamplerThreads) -> None:
    seen: set[int] = set()

    def note(_: object, logits: Tensor) -> Tensor:
        seen.add(threading.get_ident())
        return logits

    sampler = Sampler()
    sampler.operators = Shared(threads)
    for seed in range(5):
        _sample(sampler, seed, _draws(seed, 0, logits_processors=[note]))
    assert seen == {threading.get_ident()}


def test_helpers_keep_torch_to_themselves(library: Library, threads: SamplerThreads) -> None:
    """And do take part: each task waits until another thread has begun one."""
    meeting = threading.Barrier(3, timeout=30)
    found: list[tuple[int, int, bool]] = []

    def process() -> Piece:
        meeting.wait()
        found.append((threading.get_ident(), torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return None  # type: ignore[return-value]

    with library.torch_on_one_thread():
        threads.run([Task(process, is_bound=False)] * 3)
    assert len({thread for thread, _, _ in found}) == 3
    assert {(count, inference) for _, count, inference in found} == {(1, True)}


@pytest.mark.parametrize("bad", [0, 5])
def test_a_fault_comes_out_and_the_next_step_works(threads: SamplerThreads, bad: int) -> None:
    def fail() -> Piece:
        raise ValueError("no such logits")

    def work() -> Piece:
        return None  # type: ignore[return-value]

    tasks = [Task(fail if number == bad else work, is_bound=False) for number in range(6)]
    for _ in range(20):
        with pytest.raises(ValueError, match="no such logits"):
            threads.run(tasks)
        assert threads.run([Task(work, is_bound=False)] * 6) == [None] * 6


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not() -> None:
    program = (
        "import os, sys, torch\n"
        "from ramify.cpu.library import load\n"
        "from ramify.cpu.sampler_threads import SamplerThreads\n"
        "from ramify.sampling.operators import Task\n"
        "from ramify.cpu.library import Library\n"
        "Library.threads = 3\n"
        "threads = SamplerThreads(load(print))\n"
        "tasks = [Task(lambda: torch.ones(2), is_bound=False)] * 9\n"
        "assert len(threads.run(tasks)) == 9\n"
        "child = os.fork()\n"
        "assert len(threads.run(tasks)) == 9\n"
        "if child == 0:\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_one_thread_asks_nobody(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "threads", 1)
    alone = SamplerThreads(library)
    assert alone.run([Task(lambda: None, is_bound=False)] * 4) == [None] * 4
    assert alone._executor is None
