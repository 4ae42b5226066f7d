"""One process of test_bits.py: engines, what they answer to the requests, and what really happened meanwhile.

    python -m tests.gpu.bits_process FOLDER SCHEDULE OUT

It asks for its share of the requests one after the other, and then, with another engine, for all of them in a busy
schedule; the shares of all schedules together are all requests.
"""

from __future__ import annotations

import gc
import json
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ramify import LLM, SamplingParams
from ramify.device.reads import Reads
from ramify.device.step import DeviceStep
from ramify.engine.plan import PENDING, Plan, Ticket
from tests import bits

ALONE = "alone"
COUNT = 500
LONGEST_PROMPT, MOST_TOKENS, WRITERS = 900, 40, 0.17
SAMPLES = (1, 2, 9, 64)  # of one long prompt: the first children of each are the same
FIRST_CUT = 256  # positions: what is computed again beyond it is in several parts

SCHEDULES: dict[str, dict[str, Any]] = {
    ALONE: {"num_kv_blocks": 400, "max_num_seqs": 64},
    "all at once": {"num_kv_blocks": 4_000, "max_num_seqs": 384},
    "prompts in pieces, without graphs": {
        "num_kv_blocks": 1_200,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 384,
        "enforce_eager": True,
    },
    "a cache that runs out": {"num_kv_blocks": 380, "max_num_seqs": 256, "max_num_batched_tokens": 2_048},
}
BUSY = [name for name in SCHEDULES if name != ALONE]


def requests(vocab_size: int) -> list[bits.Asked]:
    """The same in every process."""
    numbers = random.Random(0)
    asked = bits.random_requests(
        COUNT,
        numbers,
        vocab_size=vocab_size,
        longest_prompt=LONGEST_PROMPT,
        most_tokens=MOST_TOKENS,
        writers=WRITERS,
    )
    prompt = [numbers.randrange(vocab_size) for _ in range(1_300)]
    for n in SAMPLES:
        params = SamplingParams(n=n, seed=5, max_tokens=MOST_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
        asked.append(bits.Asked(prompt, params))
    return asked


class Watch:
    """Counts what a schedule is meant to bring about, as the engine asks its device for it."""

    def __init__(self, llm: LLM) -> None:
        step = llm.core.device
        assert isinstance(step, DeviceStep)
        self.counts: Counter[str] = Counter()
        self._launch, self._prepare = step.launch, step.lanes[0].layers.prepare
        step.launch = self.launch  # type: ignore[method-assign]
        step.lanes[0].layers.prepare = self.prepare  # type: ignore[method-assign]

    def launch(self, plan: Plan) -> Ticket:
        [work] = plan.works
        prompts = [chunk for chunk in work.chunks if len(chunk.token_ids) > 1]
        again = [draw for draw in plan.draws if draw.position and draw.rows[0].offset]
        members = () if plan.onward is None else plan.onward.members
        self.counts["steps"] += 1
        self.counts["steps ahead"] += bool(members) or any(PENDING in chunk.token_ids for chunk in work.chunks)
        self.counts["steps with prompts and decodes"] += 0 < len(prompts) < len(work.chunks) + len(members)
        self.counts["pieces of prompts"] += len(prompts)
        self.counts["outputs computed again as prompts"] += len(again)
        self.counts["of these beyond the first cut"] += sum(
            work.chunks[draw.rows[0].chunk].end > FIRST_CUT for draw in again
        )
        self.counts["most draws in a step"] = max(self.counts["most draws in a step"], len(members) + len(plan.draws))
        return self._launch(plan)

    def prepare(self, reads: Reads) -> None:
        self.counts["steps with shared reads"] += bool(reads.shared)
        self._prepare(reads)


def engine(folder: str, **options: Any) -> LLM:
    return LLM(folder, load_format="dummy", max_model_len=1_536, batch_invariant=True, **options)


def answered(llm: LLM, schedule: str, asked: Sequence[bits.Asked]) -> list[list[Any]]:
    if schedule == ALONE:  # and children of one prompt read it each for itself
        for lane in llm.core.device.lanes:  # type: ignore[attr-defined]
            lane.layers.sharing = replace(lane.layers.sharing, fewest_positions=sys.maxsize)
        return bits.told_alone(llm, asked)
    numbers = random.Random(schedule)
    if schedule != "a cache that runs out":
        return bits.told_together(llm, asked, numbers, waves=3)
    # Short prompts first: many begin at once, and all grow until the cache has no room for them.
    order = sorted(range(len(asked)), key=lambda index: (len(asked[index].prompt) // 100, numbers.random()))
    answers = dict(zip(order, bits.told_together(llm, [asked[index] for index in order], None), strict=True))
    return [answers[index] for index in range(len(asked))]


def main(folder: str, schedule: str, out: str) -> None:
    facts = json.loads((Path(folder) / "config.json").read_text())
    asked = requests(min(100_000, facts["vocab_size"]))
    own = range(BUSY.index(schedule), len(asked), len(BUSY))
    told = {}
    for each, numbers in ((ALONE, own), (schedule, range(len(asked)))):
        began = time.perf_counter()
        llm = engine(folder, **SCHEDULES[each])
        watch = Watch(llm)
        ready = time.perf_counter()
        answers = answered(llm, each, [asked[number] for number in numbers])
        counts = watch.counts + Counter({name: int(count) for name, count in llm.stats().items()})
        told[each] = dict(zip(numbers, answers, strict=True)), counts
        seconds = {"start": round(ready - began, 1), "requests": round(time.perf_counter() - ready, 1)}
        print(json.dumps({"shape": Path(folder).name, "schedule": each, **seconds, **counts}), flush=True)
        Path(out).write_bytes(pickle.dumps(told))  # what is told is there, however this ends
        del llm, watch
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
