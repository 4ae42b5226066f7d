"""What the host does for a sample does not grow with how many there are: counted in calls, on a free device."""

from __future__ import annotations

import cProfile
import pstats
import tracemalloc
from collections.abc import Callable

from ramify import Request, SamplingParams
from ramify.engine.core import EngineCore
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import Plan, StepResult, Ticket
from tests.fake import fake_engine


class Nothing:
    """Draws the same token everywhere."""

    runs_ahead = True
    chooses = False
    drew_by_kernels = False

    def looks_back(self, _asked: SamplerChoice) -> bool:
        return True

    def launch(self, plan: Plan) -> Ticket:
        count = len(plan.draws) + (0 if plan.onward is None else len(plan.onward.members))
        return lambda: StepResult([5] * count, [-1.0] * count)

    def begin(self, plan: Plan) -> Callable[[], Ticket]:
        return lambda: self.launch(plan)

    def reset(self) -> None:
        pass


def engine() -> EngineCore:
    core = fake_engine(
        num_blocks=4096, block_size=16, max_num_seqs=32, max_num_batched_tokens=8192, max_model_len=16_384
    )
    core.device = Nothing()
    return core


def calls_of(act: Callable[[], None]) -> int:
    profile = cProfile.Profile()
    profile.runcall(act)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def finish(core: EngineCore) -> None:
    while core.has_unfinished():
        core.step()


def test_a_sample_costs_as_much_among_many() -> None:
    """Each that ended had all its siblings looked at: for 8,000 of them that was nine tenths of all calls."""

    def each(n: int) -> float:
        core = engine()
        core.add_request(Request("r", None, [1] * 20, SamplingParams(n=n, max_tokens=3, ignore_eos=True)))
        return calls_of(lambda: finish(core)) / n

    assert each(1_600) < 1.2 * each(200)


def test_a_step_costs_as_much_while_many_wait_and_after_many_have_ended() -> None:
    def step(num_waiting: int, num_ended: int) -> int:
        core = engine()
        for number in range(num_ended):
            core.add_request(Request(f"ended {number}", None, [number % 250] * 3, SamplingParams(max_tokens=1)))
        finish(core)
        for number in range(32 + num_waiting):
            params = SamplingParams(max_tokens=1_000, ignore_eos=True)
            core.add_request(Request(str(number), None, [number % 250] * 5, params))
        for _ in range(4):
            core.step()

        def steps() -> None:
            for _ in range(20):
                core.step()

        return calls_of(steps)

    few = step(1, 1)
    assert step(2_000, 1) < 1.1 * few
    assert step(1, 500) < 1.1 * few


def test_samples_of_a_long_prompt_share_it() -> None:
    """Each held a list of its own: a thousand samples of 32,000 tokens took 260 MB."""
    core = engine()
    prompt = list(range(1, 8_001))
    core.add_request(Request("r", None, prompt, SamplingParams(n=100, max_tokens=3, ignore_eos=True)))
    tracemalloc.start()
    try:
        core.step()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 30 * 8 * len(prompt)
    finish(core)
