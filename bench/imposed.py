"""Drafts that are right as often as is asked, whatever they are: for random weights, which agree on nothing.

The student makes its passes and the teacher checks what it drafted, in their time. Then some drafts are told to be what
was drawn, and others not to be. What is drawn after a token that only seems right means nothing, and takes as long.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from gpu import engine  # type: ignore[import-not-found]
from gpu_workloads import WORKLOADS  # type: ignore[import-not-found]
from torch.profiler import ProfilerActivity, profile

from ramify import OptimalSampling
from ramify.device.chain import Chain
from ramify.device.draws import Draws
from ramify.device.lane import Lane
from ramify.engine.drafting.pace import Pace
from ramify.engine.drafting.tempo import Tempo
from ramify.engine.plan import GUESS, Plan, StepResult, Ticket

ASIDE = ", aside"
FEW, MOST_KERNELS = 24, 45
OF_PARTS = 128  # tokens of each output, where parts are timed


class Imposed:
    """Stands before what compares drafts with what was drawn: on the device's way back, or on the host."""

    def __init__(self, core: Any, acceptance: float) -> None:
        self._core, self._launch = core, core.device.launch
        self._acceptance = acceptance
        self._chance = random.Random(0)
        self._count_right = Chain._count_right

    def _told(self, drawn: int) -> int:
        return drawn if self._chance.random() < self._acceptance else drawn ^ 1

    def count_right(self, drawn: Any, drafted: Any, rows: Any) -> Any:
        """Of drafts that the host has not seen yet."""
        for row, tokens in zip(rows.tolist(), drawn.tolist(), strict=True):
            drafted[row, : len(tokens) - 1] = [self._told(token_id) for token_id in tokens[:-1]]
        return self._count_right(drawn, drafted, rows)

    def launch(self, plan: Plan) -> Ticket:
        """With drafts that the host knows."""
        ticket = self._launch(plan)
        return (lambda: self._imposed(plan, ticket())) if any(draw.presumed for draw in plan.draws) else ticket

    def _imposed(self, plan: Plan, result: StepResult) -> StepResult:
        first = len(result.token_ids) - len(plan.draws)
        for index, draw in enumerate(plan.draws, start=first):
            sequence = self._core.requests.groups[draw.request_id].children[draw.child].sequence
            if draw.presumed and sequence.drafted[0] > GUESS:
                drafted = list(sequence.drafted)
                drafted[draw.presumed - 1] = self._told(result.token_ids[index - 1])
                sequence.drafted = drafted
        return result


@contextmanager
def imposing(both: OptimalSampling, acceptance: float) -> Iterator[None]:
    imposed = Imposed(both.core, acceptance)
    with (
        patch.object(both.core.device, "launch", imposed.launch),
        patch.object(Chain, "_count_right", imposed.count_right),
    ):
        yield


class Parts:
    """What the device works on, and what it waits between: events around the parts of steps."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, Any, Any]] = []

    def around(self, name: Callable[..., str], method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            told = method(*arguments, **options)
            end.record()
            is_aside = torch.cuda.current_stream() != torch.cuda.default_stream()
            self._noted.append((name(*arguments) + (ASIDE if is_aside else ""), begin, end))
            return told

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        def of_lane(lane: Lane, *_: Any) -> str:
            if not lane.size:
                return "nothing"
            who, how = "teacher" if lane._number == 0 else "student", "" if lane.leaves_all else " at once"
            return f"{who} {lane.size} rows{how}"

        with ExitStack() as stack:
            stack.enter_context(patch.object(Lane, "compute", self.around(of_lane, Lane.compute)))
            stack.enter_context(
                patch.object(Chain, "_draw", self.around(lambda _, size, __: f"draft {size} rows", Chain._draw))
            )
            stack.enter_context(
                patch.object(
                    Draws, "_run", self.around(lambda _, __, size, ___: f"mix and draw {size} rows", Draws._run)
                )
            )
            yield

    def lines(self) -> list[str]:
        """Milliseconds of each part, by the median, and how many there were; between parts, what the device waited."""
        torch.cuda.synchronize()
        times, last = defaultdict(list), None
        for name, begin, end in self._noted:
            if name == "nothing":
                continue
            times[name].append(begin.elapsed_time(end))
            if name.endswith(ASIDE):
                continue
            if last is not None:
                times[f"… from {last[0]} to {name}"].append(last[1].elapsed_time(begin))
            last = name, end
        total = sum(map(sum, times.values())) or 1.0
        return [
            f"      {name:64} {median(each):7.3f} ms, {len(each):5} times, {sum(each) / total:5.1%} of all"
            for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))
            if sum(each) / total > 0.005
        ]


def imposed(
    workload_name: str, acceptances: list[float], *, rehearse: bool, repeats: int, parts: Sequence[int] = ()
) -> dict[str, Any]:
    workload = WORKLOADS[workload_name]
    workload = workload.rehearsed() if rehearse else workload
    prompts, _ = workload.requests()
    options = {**workload.params, "max_tokens": workload.outputs[0], "ignore_eos": True, "detokenize": False, "seed": 1}
    with TemporaryDirectory() as folder:
        both = engine(workload.model, Path(folder), rehearse=rehearse, speculation="student")
    speculation = both.core.scheduler.speculation
    if rehearse:
        speculation.most_rows = None  # however many there are on a CPU: what is drafted is looked at, not the speed

    def run(**changes: Any) -> float:
        """Tokens a second."""
        both.reset_prefix_cache()
        start = time.perf_counter()
        outputs = both.generate(prompts, use_tqdm=False, **{**options, **changes})
        return float(sum(outputs.num_tokens) / (time.perf_counter() - start))

    def fastest(**changes: Any) -> float:
        run(**changes)  # kernels are compiled, graphs are captured, and times become known
        return max(run(**changes) for _ in range(repeats))

    with patch.object(both.core.device, "computes_both", new=False):
        in_turn = fastest(speculate=False)
    plain = fastest(speculate=False)
    print(
        f"{workload.name}: {plain:,.0f} tok/s without drafts, {in_turn:,.0f} with one model after the other", flush=True
    )
    results: dict[str, Any] = {"plain": plain, "plain, in turn": in_turn}
    for acceptance in acceptances:
        before = both.stats()["engine"]
        with imposing(both, acceptance), _always(3) if rehearse else ExitStack():
            speed = fastest()
        after = both.stats()["engine"]
        drafted, drawn = (after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))
        print(
            f"  acceptance {acceptance:4}: {speed:,.0f} tok/s, {speed / plain:.3f} times, {speed / in_turn:.3f} of one "
            f"after the other; {drawn:,} of {drafted:,} drafted tokens were drawn",
            flush=True,
        )
        results[str(acceptance)] = speed
    tempo = getattr(speculation, "tempo", None)
    if tempo is not None:
        print("  " + "; ".join(tempo.lines()), flush=True)
    if parts:
        short = {"max_tokens": OF_PARTS}
        plain = fastest(speculate=False, **short)
        with imposing(both, max(acceptances)):
            results["by length"] = {each: _by_length(partial(run, **short), plain, each) for each in parts}
            _kernels(partial(run, max_tokens=FEW), parts[0])
    return results


def _by_length(run: Callable[[], float], plain: float, length: int) -> float:
    """Drafts of the same length in every step, and where the time of these steps goes."""
    watch = Parts()
    with _always(length):
        run()
        run()  # sizes that come again are captured now
        speed = max(run() for _ in range(2))
        with watch.watching():
            run()
        print(f"  {length} drafted: {speed:,.0f} tok/s, {speed / plain:.3f} times", flush=True)
        for line in watch.lines():
            print(line, flush=True)
    return speed


def _kernels(run: Callable[[], float], length: int) -> None:
    """Which kernels take most, with drafts of this length."""
    with _always(length), profile(activities=[ProfilerActivity.CUDA]) as told:
        run()
    events = sorted(told.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:MOST_KERNELS]:
        print(f"      {event.count:6} x {event.device_time:8.1f} us  {event.key[:90]}")


@contextmanager
def _always(length: int) -> Iterator[None]:
    """Drafts of this length, whatever they cost."""

    def at_most(_tempo: Tempo, _size: int, most: int, _share: float) -> int:
        return min(length, max(0, most))

    with patch.object(Pace, "length", return_value=length), patch.object(Tempo, "length", at_most):
        yield
