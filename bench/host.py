"""What the host costs: scheduling, planning, recording and detokenising, on a device that answers at once.

Three questions. How long does a step take the host while 64 sequences run (goal: under 1 ms)? Does a step get slower
with the number of requests already finished (10,000 short ones; goal: no)? And how long does a step of 64 beams take
it, with all that the host does for a GPU: rows, block tables, lists of attention, candidates? Times are those of the
processor: whoever else uses the machine lengthens them less.

    python bench/host.py
    python bench/host.py --only beams
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
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ramify import Request, SamplingParams
from ramify.device.layers import Batch
from ramify.device.reads import Reads
from ramify.device.step import DeviceStep
from ramify.engine.blocks import BlockManager
from ramify.engine.core import Device, EngineCore
from ramify.engine.plan import Plan, StepResult, Ticket, Work
from ramify.engine.scheduler import Scheduler
from ramify.gpu.gpu_layers import SHARING
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
    looks_back = False

    def reset(self) -> None:
        pass

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

    def forward(self, batch: Batch, rows: Sequence[int] | None = None) -> Tensor:
        return torch.empty(len(batch.token_ids) if rows is None else len(rows), 1)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out


class InstantSampler(KernelSampler):
    """A GPU's sampler, whose candidates are random tokens with random logprobs, likeliest first."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 1_024, torch.device("cpu"), "raw")
        self._generator = torch.Generator().manual_seed(0)
        self.seconds = 0.0

    def draw(self, logits: Sequence[Tensor], *_: object) -> None:
        start = time.thread_time()
        token_ids, weights, logprobs = (part[: len(logits[0])] for part in self._drawn.candidates)
        token_ids.random_(FIRST_TOKEN, LAST_TOKEN, generator=self._generator)
        weights.copy_(-torch.rand(weights.shape, generator=self._generator).cumsum(-1))
        logprobs.copy_(weights)
        self.seconds += time.thread_time() - start


def engine(tokenizer: Tokenizer, device: Device) -> EngineCore:
    scheduler = Scheduler(
        [BlockManager(5_000, BLOCK_SIZE, enable_prefix_caching=True)],
        max_num_seqs=256,
        max_num_batched_tokens=8192,  # all prompts at once, so that all sequences step together
        max_model_len=MAX_MODEL_LEN,
    )
    return EngineCore(
        scheduler,
        device,
        seed=0,
        eos_token_ids=frozenset({2}),
        make_text=lambda _params: TextStream(IncrementalDetokenizer(tokenizer)),
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


def beams(tokenizer: Tokenizer) -> float:
    """The median of 64 steps with 8 searches of 8 beams running, prompts of 512 tokens."""
    sampler = InstantSampler(max_rows=256)
    device = DeviceStep([InstantLayers(256)], max_num_seqs=256, kernels=sampler, runs_ahead=True)
    core = engine(tokenizer, device)
    numbers = random.Random(0)
    params = SamplingParams(strategy="beam_search", beam_width=8, max_tokens=80)
    for number in range(8):
        prompt = [numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(512)]
        core.add_request(Request(str(number), None, prompt, params))
    while any(len(gang.sequences) < 8 for gang in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    gc.freeze()  # as the loops of every driver do
    return statistics.median(host_ms(core, sampler) for _ in range(64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["samples", "many", "beams"], help="one of the three questions")
    only = parser.parse_args().only
    tokenizer = tokenizer_from_gguf(GGUFFile.open(Path(embedded.fetch())).metadata)
    found: dict[str, float] = {}
    if only in (None, "samples"):
        siblings, strangers = steady_state(tokenizer, True), steady_state(tokenizer, False)
        print(f"64 siblings of one 1,024-token prompt     {siblings:7.3f} ms of host time a step (goal: under 1)")
        print(f"64 different 1,024-token prompts          {strangers:7.3f} ms")
        found |= {"siblings64_ms": siblings, "strangers64_ms": strangers}
    if only in (None, "many"):
        first, last = after_many(tokenizer)
        print(f"10,000 requests: first tenth, last tenth  {first:7.3f} ms, {last:.3f} ms ({last / first:.2f}x)")
        found |= {"first_tenth_ms": first, "last_tenth_ms": last}
    if only in (None, "beams"):
        found["beams64_ms"] = beams(tokenizer)
        print(f"8 searches of 8 beams, on a GPU           {found['beams64_ms']:7.3f} ms")
    result = {
        "engine": "ramify",
        "workload": "host",
        **{name: round(value, 3) for name, value in found.items()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
