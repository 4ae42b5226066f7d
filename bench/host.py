"""What the host costs: scheduling, planning, recording and detokenising, on a device that answers at once.

Two questions. How long does a step take the host while 64 sequences run (goal: under 1 ms)? And does a step get slower
with the number of requests already finished (10,000 short ones; goal: no)?

    python bench/host.py
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from pathlib import Path

from ramify import Request, SamplingParams
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.plan import Plan, StepResult, Ticket
from ramify.engine.scheduler import Scheduler
from ramify.models import embedded
from ramify.models.gguf_file import GGUFFile
from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.gguf_tokenizer import tokenizer_from_gguf
from ramify.text.stream import TextStream
from ramify.text.tokenizer import Tokenizer


class InstantDevice:
    """Draws random tokens at once; measures the time it takes itself, so that it can be subtracted."""

    def __init__(self) -> None:
        self._numbers = random.Random(0)
        self.seconds = 0.0

    runs_ahead = False
    looks_back = False

    def reset(self) -> None:
        pass

    def launch(self, plan: Plan) -> Ticket:
        start = time.perf_counter()
        tokens = [self._numbers.randrange(100, 49_000) for _ in plan.draws]
        result = StepResult(tokens, [-1.0] * len(tokens))
        self.seconds += time.perf_counter() - start
        return lambda: result


def engine(tokenizer: Tokenizer) -> tuple[EngineCore, InstantDevice]:
    device = InstantDevice()
    scheduler = Scheduler(
        [BlockManager(5_000, 16, enable_prefix_caching=True)],
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
    )
    core = EngineCore(
        scheduler,
        device,
        seed=0,
        eos_token_ids=frozenset({2}),
        make_text=lambda _params: TextStream(IncrementalDetokenizer(tokenizer)),
    )
    return core, device


def host_ms(core: EngineCore, device: InstantDevice) -> float:
    before = device.seconds
    start = time.perf_counter()
    core.step()
    return 1e3 * (time.perf_counter() - start - (device.seconds - before))


def steady_state(tokenizer: Tokenizer, siblings: bool) -> float:
    """The median step with 64 sequences running, prompts of 1,024 tokens."""
    core, device = engine(tokenizer)
    numbers = random.Random(0)
    params = SamplingParams(n=64 if siblings else 1, max_tokens=200, ignore_eos=True)
    for number in range(1 if siblings else 64):
        prompt = [numbers.randrange(100, 49_000) for _ in range(1024)]
        core.add_request(Request(str(number), None, prompt, params))
    while len(core.scheduler.running) < 64 or core.scheduler.waiting:
        core.step()
    for _ in range(40):
        core.step()
    return statistics.median(host_ms(core, device) for _ in range(100))


def after_many(tokenizer: Tokenizer) -> tuple[float, float]:
    """Mean host time of a step with 16 short requests running: for the first thousand requests and for the last."""
    core, device = engine(tokenizer)
    numbers = random.Random(0)
    times: list[float] = []
    for number in range(10_000):
        prompt = [numbers.randrange(100, 49_000) for _ in range(8)]
        core.add_request(Request(str(number), None, prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
        if number % 16 == 15:
            while core.has_unfinished():
                times.append(host_ms(core, device))
    tenth = len(times) // 10
    return statistics.median(times[:tenth]), statistics.median(times[-tenth:])


def main() -> None:
    tokenizer = tokenizer_from_gguf(GGUFFile.open(Path(embedded.fetch())).metadata)
    siblings, strangers = steady_state(tokenizer, True), steady_state(tokenizer, False)
    first, last = after_many(tokenizer)
    print(f"64 siblings of one 1,024-token prompt     {siblings:7.3f} ms of host time a step (goal: under 1)")
    print(f"64 different 1,024-token prompts          {strangers:7.3f} ms")
    print(f"10,000 requests: first tenth, last tenth  {first:7.3f} ms, {last:.3f} ms ({last / first:.2f}x)")
    result = {
        "engine": "ramify",
        "workload": "host",
        "siblings64_ms": round(siblings, 3),
        "strangers64_ms": round(strangers, 3),
        "first_tenth_ms": round(first, 3),
        "last_tenth_ms": round(last, 3),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
