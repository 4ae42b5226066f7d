"""What the host costs: scheduling, planning, recording and detokenising, on a device that answers at once.

    samples   how long does a step take the host while 64 sequences run (goal: under 1 ms)?
    many      does a step get slower with the number of requests already finished (10,000 short ones; goal: no)?
    steady    with all that the host does for a GPU (rows, block tables, lists of attention, results): how long does a
              step take while 64, 256 or 512 sequences just go on (goal: flat), with logprobs, with penalties, as fans?
    burst     the same while 1,000 prompts of 50 to 1,500 tokens come at once, and outputs of 32 to 400 end all the time
    beams     the same for 8 searches of 8 beams

Times are those of the processor: whoever else uses the machine lengthens them less. The quickest of many steps says
more than their median where the machine is busy.

    python bench/host.py
    python bench/host.py --only steady burst
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify import Request, SamplingParams
from ramify.device.layers import Batch
from ramify.device.reads import Reads
from ramify.device.step import DeviceStep
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.demands import SamplerChoice
from ramify.engine.device import Device
from ramify.engine.plan import Plan, StepResult, Ticket, Work
from ramify.engine.scheduler import Scheduler
from ramify.gpu.gpu_layers import SHARING
from ramify.gpu.kernels import selection
from ramify.gpu.kernels.stretches import EvenCuts
from ramify.gpu.paged import PagedDecode
from ramify.gpu.sampler import KernelSampler
from ramify.gpu.tables import DeviceTables
from ramify.models import embedded
from ramify.models.gguf_file import GGUFFile
from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.gguf_tokenizer import tokenizer_from_gguf
from ramify.text.stream import TextStream
from ramify.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 8192
BLOCK_SIZE = 16
FIRST_TOKEN, LAST_TOKEN = 100, 49_000  # drawn from these: none ends an output


class InstantDevice:
    """Draws random tokens at once; measures the time it takes itself, so that it can be subtracted."""

    def __init__(self) -> None:
        self._numbers = random.Random(0)
        self.seconds = 0.0

    runs_ahead = False
    chooses = drew_by_kernels = False

    def looks_back(self, _asked: SamplerChoice) -> bool:
        return False

    def reset(self) -> None:
        pass

    def begin(self, plan: Plan) -> Callable[[], Ticket]:
        return partial(self.launch, plan)

    def launch(self, plan: Plan) -> Ticket:
        start = time.thread_time()
        tokens = [self._numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in plan.draws]
        result = StepResult(tokens, [-1.0] * len(tokens))
        self.seconds += time.thread_time() - start
        return lambda: result


class InstantPool:
    block_size = BLOCK_SIZE

    def move(self, work: Work) -> None:
        pass


class InstantLayers:
    """All that a GPU's layers do on the host, and nothing on the device."""

    device = torch.device("cpu")
    vocab_size = 1
    sharing = SHARING

    def __init__(self, max_rows: int) -> None:
        self.pool = InstantPool()
        self._decodes = PagedDecode(
            max_rows=max_rows,
            max_parts=max_rows * EvenCuts.most_parts(MAX_MODEL_LEN),
            max_blocks=MAX_MODEL_LEN // BLOCK_SIZE,
            heads=32,
            kv_heads=8,
            head_dim=1,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=self.device,
        )
        self._tables = DeviceTables(self._decodes.tables)

    def prepare(self, reads: Reads) -> None:
        self._tables.follow(reads)
        if reads.num_singles:
            self._decodes.write_list(self._decodes.work_list(reads))

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        return torch.empty(len(batch.token_ids) if rows is None else len(rows), 1)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out


class InstantSampler(KernelSampler):
    """A GPU's sampler that draws the same tokens in every step. Beams' candidates are random, likeliest first."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 1_024, torch.device("cpu"), "raw")
        self._generator = torch.Generator().manual_seed(0)
        self._drawn.token_ids.random_(FIRST_TOKEN, LAST_TOKEN, generator=self._generator)
        self.seconds = 0.0

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:  # noqa: ARG002
        if not choice.candidates:
            return
        start = time.thread_time()
        token_ids, weights, logprobs, _, _ = (part[: len(logits[0])] for part in self._drawn.candidates)
        token_ids.random_(FIRST_TOKEN, LAST_TOKEN, generator=self._generator)
        weights.copy_(-torch.rand(weights.shape, generator=self._generator).cumsum(-1))
        logprobs.copy_(weights)
        if choice.chooses:
            self._select()
        self.seconds += time.thread_time() - start

    def _select(self) -> None:
        """What the kernel tells of the beams it chooses, where nothing ends."""
        fields, drawn, searches = selection, self._drawn, self._searches
        drawn.selected.zero_()
        for entry in searches._list[1 : 1 + int(searches._list[0, 0])]:
            width, count, slot, is_told = entry[: fields.NUM_ENDS.value].tolist()
            rows = entry[fields.ROWS.value : fields.ROWS.value + width]
            told = entry[fields.TOTALS.value : fields.TOTALS.value + width].view(torch.float64)
            totals = told if is_told else searches._totals[slot, :width]
            best, flat = (totals[:, None] + drawn.candidates.weights[rows, :count].double()).flatten().topk(width)
            parents = [place // count for place in flat.tolist()]
            vacant = sorted(set(range(width)) - set(parents))
            for standing, (place, parent) in enumerate(zip(flat.tolist(), parents, strict=True)):
                target = parent if parent not in parents[:standing] else vacant.pop()
                row, source = int(rows[target]), int(rows[parent])
                drawn.token_ids[row] = drawn.candidates.token_ids[source, place % count]
                drawn.logprobs[row] = drawn.candidates.logprobs[source, place % count]
                searches._totals[slot, target] = best[standing]
                drawn.selected[row, : fields.TOTAL.value] = torch.tensor([parent, standing, 1])
                drawn.selected[row, fields.TOTAL.value] = best[standing : standing + 1].view(torch.int64)[0]


def engine(tokenizer: Tokenizer, device: Device, *, max_num_seqs: int = 256, num_blocks: int = 5_000) -> EngineCore:
    scheduler = Scheduler(
        [BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,  # all prompts at once, so that all sequences step together
        max_model_len=MAX_MODEL_LEN,
    )
    return EngineCore(
        scheduler,
        device,
        seed=0,
        eos_token_ids=frozenset({2}),
        make_text=lambda _params, _prompt: TextStream(IncrementalDetokenizer(tokenizer)),
    )


def host_ms(core: EngineCore, device: InstantDevice | InstantSampler) -> float:
    before = device.seconds
    start = time.thread_time()
    core.step()
    return 1e3 * (time.thread_time() - start - (device.seconds - before))


def steady_state(tokenizer: Tokenizer, siblings: bool) -> float:
    """The median step with 64 sequences running, prompts of 1,024 tokens."""
    device = InstantDevice()
    core = engine(tokenizer, device)
    numbers = random.Random(0)
    params = SamplingParams(n=64 if siblings else 1, max_tokens=200, ignore_eos=True)
    for number in range(1 if siblings else 64):
        prompt = [numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(1024)]
        core.add_request(Request(str(number), None, prompt, params))
    while len(core.scheduler.running) < 64 or core.scheduler.waiting:
        core.step()
    for _ in range(40):
        core.step()
    return statistics.median(host_ms(core, device) for _ in range(100))


def after_many(tokenizer: Tokenizer) -> tuple[float, float]:
    """Mean host time of a step with 16 short requests running: for the first thousand requests and for the last."""
    device = InstantDevice()
    core = engine(tokenizer, device)
    numbers = random.Random(0)
    times: list[float] = []
    for number in range(10_000):
        prompt = [numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(8)]
        core.add_request(Request(str(number), None, prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
        if number % 16 == 15:
            while core.has_unfinished():
                times.append(host_ms(core, device))
    tenth = len(times) // 10
    return statistics.median(times[:tenth]), statistics.median(times[-tenth:])


class OnGpu:
    """An engine with all that the host does for a GPU."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.sampler = InstantSampler(max_rows=512)
        device = DeviceStep([InstantLayers(512)], max_num_seqs=512, kernels=self.sampler, runs_ahead=True, chooses=True)
        self.core = engine(tokenizer, device, max_num_seqs=512, num_blocks=100_000)
        self._numbers = random.Random(0)
        self._num_added = 0

    def add(self, length: int, **params: Any) -> None:
        prompt = [self._numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]
        self.core.add_request(Request(str(self._num_added), None, prompt, SamplingParams(**params)))
        self._num_added += 1

    def times(self, most: int) -> list[float]:
        """Host times of so many steps, or of all there are."""
        gc.collect()
        gc.freeze()  # as the loops of every driver do
        found: list[float] = []
        while self.core.has_unfinished() and len(found) < most:
            found.append(host_ms(self.core, self.sampler))
        gc.unfreeze()
        return found


def steady(tokenizer: Tokenizer, count: int, samples: int, length: int, **params: Any) -> list[float]:
    """200 steps in which everyone just goes on."""
    on_gpu = OnGpu(tokenizer)
    for _ in range(count):
        on_gpu.add(length, n=samples, max_tokens=300, ignore_eos=True, **params)
    scheduler = on_gpu.core.scheduler
    while scheduler.waiting or len(scheduler.running) < count * samples:
        on_gpu.core.step()
    for _ in range(20):
        on_gpu.core.step()
    return on_gpu.times(200)


def burst(tokenizer: Tokenizer) -> list[float]:
    """All steps."""
    on_gpu, numbers = OnGpu(tokenizer), random.Random(1)
    for _ in range(1_000):
        on_gpu.add(numbers.randint(50, 1_500), max_tokens=numbers.randint(32, 400), ignore_eos=True, top_p=0.95)
    return on_gpu.times(5_000)


def beams(tokenizer: Tokenizer) -> list[float]:
    """64 steps with 8 searches of 8 beams, prompts of 512 tokens."""
    on_gpu = OnGpu(tokenizer)
    for _ in range(8):
        on_gpu.add(512, strategy="beam_search", beam_width=8, max_tokens=80)
    scheduler = on_gpu.core.scheduler
    while any(len(gang.sequences) < 8 for gang in scheduler.running) or scheduler.waiting:
        on_gpu.core.step()
    return on_gpu.times(64)


STEADY: dict[str, tuple[str, tuple[int, int, int], dict[str, Any]]] = {
    "rows64": ("64 sequences that just go on", (64, 1, 128), {}),
    "rows256": ("256", (256, 1, 128), {}),
    "rows512": ("512", (512, 1, 128), {}),
    "logprobs256": ("256 with logprobs", (256, 1, 128), {"logprobs": 5}),
    "penalties256": ("256 with penalties", (256, 1, 128), {"repetition_penalty": 1.1, "presence_penalty": 0.2}),
    "fan8x32": ("32 samples of each of 8 prompts", (8, 32, 2_048), {}),
}
QUESTIONS = ("samples", "many", "steady", "burst", "beams")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="some of the questions")
    only = parser.parse_args().only
    tokenizer = tokenizer_from_gguf(GGUFFile.open(Path(embedded.fetch())).metadata)
    found: dict[str, float] = {}

    def tell(name: str, label: str, times: list[float]) -> None:
        found[f"{name}_ms"], found[f"{name}_quickest_ms"] = statistics.median(times), min(times)
        whole = f", {sum(times) / len(times):.3f} on average of {len(times)} steps" if name == "burst" else ""
        print(f"{label:<42}{found[f'{name}_ms']:7.3f} ms, the quickest {min(times):.3f}{whole}", flush=True)

    if "samples" in only:
        siblings, strangers = steady_state(tokenizer, True), steady_state(tokenizer, False)
        print(f"64 siblings of one 1,024-token prompt     {siblings:7.3f} ms of host time a step (goal: under 1)")
        print(f"64 different 1,024-token prompts          {strangers:7.3f} ms")
        found |= {"siblings64_ms": siblings, "strangers64_ms": strangers}
    if "many" in only:
        first, last = after_many(tokenizer)
        print(f"10,000 requests: first tenth, last tenth  {first:7.3f} ms, {last:.3f} ms ({last / first:.2f}x)")
        found |= {"first_tenth_ms": first, "last_tenth_ms": last}
    if "steady" in only:
        for name, (label, prompts, params) in STEADY.items():
            tell(name, f"on a GPU: {label}", steady(tokenizer, *prompts, **params))
    if "burst" in only:
        times = burst(tokenizer)
        found["burst_seconds"] = sum(times) / 1e3
        tell("burst", "on a GPU: 1,000 prompts at once", times)
    if "beams" in only:
        tell("beams64", "on a GPU: 8 searches of 8 beams", beams(tokenizer))
    result = {
        "engine": "ramify",
        "workload": "host",
        **{name: round(value, 3) for name, value in found.items()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
