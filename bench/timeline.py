"""Where a whole workload's time goes on a GPU, step by step: the device at work, and the device waiting for the host.

    python bench/timeline.py mixed256 logprobs256 [--kernels 0.1 0.5 0.9] [--rehearse]

Steps are told apart by whether they hold prompts and by how many tokens they draw. For each kind: how many there are,
what the device worked, what it waited before them and, where masks of grammars come between, before their draws; what
the host took to begin them and to make their draws (masks among that), and waited for their results; and how many rows
were padding. `--kernels` profiles ten steps each, at these shares of the way through the workload, and names the
kernels that take most.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from gpu import engine, run  # type: ignore[import-not-found]
from gpu_workloads import WORKLOADS  # type: ignore[import-not-found]
from step import part_of  # type: ignore[import-not-found]

from ramify.device.graphs import padded
from ramify.engine.plan import Plan, StepResult, Ticket

STEPS_AT_ONCE = 10  # that are profiled
ROWS_OF_A_KIND = 64


@dataclass(slots=True)
class Step:
    num_draws: int
    num_prompt_rows: int
    begin: Any
    computed: Any  # all but the draws
    draw: Any = None
    end: Any = None
    beginning: float = 0.0  # seconds of the host, here and below
    drawing: float = 0.0
    waiting: float = 0.0

    @property
    def kind(self) -> str:
        low = self.num_draws // ROWS_OF_A_KIND * ROWS_OF_A_KIND
        return f"{'with prompts' if self.num_prompt_rows else 'decodes':<13}{low:4d} … {low + ROWS_OF_A_KIND - 1}"


class Watch:
    """Stands before a device's `begin`, and notes when each step begins and ends there."""

    def __init__(self, begin: Callable[[Plan], Callable[[], Ticket]], on_gpu: bool) -> None:
        self._begin, self._on_gpu = begin, on_gpu
        self.steps: list[Step] = []
        self.profiled: dict[int, str] = {}  # from which step on, and what it is called
        self._profile: Any = None
        self._profiled_from = 0

    def __call__(self, plan: Plan) -> Callable[[], Ticket]:
        number = len(self.steps)
        if self._profile is not None and number - self._profiled_from == STEPS_AT_ONCE:
            self._tell()
        if number in self.profiled and self._on_gpu:
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
            self._profiled_from = number
        num_members = 0 if plan.onward is None else len(plan.onward.members)
        lengths = [len(chunk.token_ids) for work in plan.works for chunk in work.chunks]
        num_prompt_rows = sum(length for length in lengths if length > 1)
        begin, at = self._event(), time.perf_counter()
        begun = self._begin(plan)
        step = Step(num_members + len(plan.draws), num_prompt_rows, begin, self._event())
        step.beginning = time.perf_counter() - at
        self.steps.append(step)
        return partial(self._draw, step, begun)

    def _draw(self, step: Step, begun: Callable[[], Ticket]) -> Ticket:
        at, step.draw = time.perf_counter(), self._event()
        ticket = begun()
        step.end, step.drawing = self._event(), time.perf_counter() - at
        return partial(self._wait, step, ticket)

    def _wait(self, step: Step, ticket: Ticket) -> StepResult:
        at = time.perf_counter()
        result = ticket()
        step.waiting += time.perf_counter() - at
        return result

    def _event(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, one: Any, other: Any) -> float:
        """Milliseconds."""
        return float(one.elapsed_time(other)) if self._on_gpu else 1e3 * (other - one)

    def _tell(self) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        events = self._profile.key_averages()
        self._profile = None
        step = self.steps[self._profiled_from]
        print(f"  kernels of {STEPS_AT_ONCE} steps from {self._profiled_from} on ({step.kind.strip()}), ms a step:")
        times = {event.key: event.self_device_time_total / STEPS_AT_ONCE / 1e3 for event in events}
        parts: Counter[str] = Counter()
        for name, milliseconds in times.items():
            parts[part_of(name)] += milliseconds
        print("    " + ", ".join(f"{part} {milliseconds:.3f}" for part, milliseconds in parts.most_common()))
        for name, milliseconds in sorted(times.items(), key=lambda each: -each[1])[:14]:
            print(f"    {milliseconds:8.3f}  {name[:100]}")


def tell(name: str, watch: Watch, seconds: float, tokens: int) -> None:
    steps = watch.steps
    print(f"{name}: {tokens / seconds:,.0f} tokens a second, {seconds:.3f} s, {len(steps)} steps")
    worked: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    for before, step in zip([None, *steps[:-1]], steps, strict=True):
        idle = 0.0 if before is None else max(0.0, watch.between(before.end, step.begin))
        device = watch.between(step.begin, step.computed) + watch.between(step.draw, step.end)
        masks = max(0.0, watch.between(step.computed, step.draw))
        host = (1e3 * step.beginning, 1e3 * step.drawing, 1e3 * step.waiting)
        padding = padded(step.num_draws) - step.num_draws if step.num_draws else 0
        worked[step.kind].append((device, idle, masks, *host, padding, step.num_prompt_rows))
    titles = ("device ms", "waits", "for masks", "host begins", "draws", "waits", "padding", "rows")
    print(f"  {'kind':<26}{'steps':>6}" + "".join(f"{title:>12}" for title in titles) + "   (means of a step)")
    for kind, entries in sorted(worked.items()):
        means = [sum(column) / len(entries) for column in zip(*entries, strict=True)]
        print(f"  {kind:<26}{len(entries):6d}" + "".join(f"{mean:12.3f}" for mean in means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--kernels", nargs="*", type=float, default=[])
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads:
            workload = WORKLOADS[name].rehearsed() if options.rehearse else WORKLOADS[name]
            if workload.model not in models:
                models.clear()
                models[workload.model] = engine(workload.model, Path(folder), rehearse=options.rehearse)
            llm = models[workload.model]
            run(llm, workload)  # graphs are captured, kernels compiled
            device = llm.core.device
            original = device.begin
            num_steps = 0
            for is_profiled in (False, True) if options.kernels else (False,):
                device.begin = watch = Watch(original, on_gpu)
                if is_profiled:
                    watch.profiled = {int(share * num_steps): name for share in options.kernels}
                seconds, outputs = run(llm, workload)
                num_steps = len(watch.steps)
                if on_gpu:
                    torch.cuda.synchronize()
                if not is_profiled:
                    tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
                    tell(name, watch, seconds, tokens)
            device.begin = original


if __name__ == "__main__":
    main()
