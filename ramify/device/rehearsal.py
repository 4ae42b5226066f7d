"""The largest steps an engine may be asked for, run once before its cache is sized: what they take is measured.

The cache of a rehearsal has a few blocks that all tables name again and again. What is computed there means nothing,
but it takes the memory of a real step: contexts are as long, rows and draws as many, and graphs are captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ramify.device.graphs import MOST_ROWS_WITH_PROMPTS
from ramify.device.pool import KVPool, bytes_per_block
from ramify.device.sizing import GIB, GpuMemory, numbered
from ramify.device.step import DeviceStep
from ramify.engine.demands import Demands
from ramify.engine.plan import Chunk, Draw, Plan, Row, Work
from ramify.errors import InvalidInputError
from ramify.models.decoder import Decoder
from ramify.process.garbage import collector_paused
from ramify.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
NUM_BLOCKS = 64
# Room for what a rehearsal does not see: graphs of other sizes, and allocations that lie less well. Where steps take
# more, more is unseen: 3B and 1.5B together took 1.5 GiB over what was measured.
SPARE_BYTES = 2**29
SPARE_SHARE = 0.5  # of what steps take

FEW = 16  # rows: torch's sampler takes its memory for a few at a time, and its time for all of them
NOBODY = -1  # the number of requests that never were
# What is drawn in a graph, whose kernels take no memory of their own, and what needs the sampler without one.
IN_A_GRAPH = SamplingParams()
WITH_EVERYTHING = SamplingParams(top_p=0.9, logprobs=1, repetition_penalty=1.1, logits_processors=[lambda _, row: row])


@dataclass(frozen=True, slots=True)
class Largest:
    """The bounds of one step."""

    num_models: int
    num_tracks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int

    @property
    def rows_each(self) -> int:
        """Of one model, for a token of every track."""
        return self.num_tracks // self.num_models


def largest_plans(largest: Largest) -> list[Plan]:
    """As many tokens as a step may hold, in one prompt and in many, at the end of full contexts; as many as a graph may
    hold; and all decodes."""
    # Every sequence computes a position in each of its tracks.
    most = max(1, largest.max_num_batched_tokens // largest.num_tracks)
    sequences = min(largest.max_num_seqs, most)
    each = min(most // sequences, largest.max_model_len)
    shapes = [
        ([min(most, largest.max_model_len)], WITH_EVERYTHING),
        ([each] * sequences, IN_A_GRAPH),
        (lengths_of(largest, min(most * largest.rows_each, MOST_ROWS_WITH_PROMPTS)), IN_A_GRAPH),
        ([1] * sequences, IN_A_GRAPH),
        ([1] * min(sequences, FEW), WITH_EVERYTHING),
    ]
    return [plan_of(largest, *shape, end=largest.max_model_len, num_blocks=NUM_BLOCKS) for shape in shapes]


def lengths_of(largest: Largest, num_rows: int) -> list[int]:
    """Prompts that come to so many rows of each model, or to nearly as many where sequences are too few or short."""
    each, rest = largest.max_model_len, num_rows // largest.rows_each
    lengths = [each] * (rest // each) + ([rest % each] if rest % each else [])
    return lengths[: largest.max_num_seqs]


def plan_of(largest: Largest, lengths: Sequence[int], params: SamplingParams, *, end: int, num_blocks: int) -> Plan:
    """Sequences of `end` positions, each with so many of its last tokens to compute and one to draw.

    All of them are in the same blocks, 0 … num_blocks - 1 again and again.
    """
    table = tuple(index % num_blocks for index in range(-(-end // largest.block_size)))
    demands = Demands(params, number=NOBODY, prompts=((0,),) * largest.num_tracks)
    works = [Work() for _ in range(largest.num_models)]
    draws = []
    for sequence, num_tokens in enumerate(lengths):
        rows = []
        for track in range(largest.num_tracks):
            model = track % largest.num_models
            chunks = works[model].chunks
            rows.append(Row(model, len(chunks), num_tokens - 1))
            chunks.append(Chunk([0] * num_tokens, end - num_tokens, table, f"{sequence}/{track}"))
        draws.append(Draw(str(sequence), 0, 0, 0, tuple(rows), demands, ()))
    return Plan(works, draws)


class OtherRanks(Protocol):
    """Those that share models with this process."""

    def memory(self) -> Sequence[tuple[torch.device, GpuMemory]]:
        """What each of them has found of its own GPU, in a rehearsal that all took part in."""


def measure(
    make_step: Callable[[Sequence[KVPool]], DeviceStep],
    decoders: Sequence[Decoder],
    largest: Largest,
    others: Sequence[OtherRanks] = (),
) -> dict[torch.device, GpuMemory]:
    """Runs the largest steps on the GPUs that these models are on; nothing of them stays.

    Where ranks share a model, the one with the least room counts for all.
    """
    devices = {numbered(each.device) for each in decoders if each.device.type == "cuda"}
    weights = {device: forget_peak(device) for device in devices}
    began = time.monotonic()
    try:
        cache = _run(make_step, decoders, largest)
    except torch.OutOfMemoryError as error:
        raise InvalidInputError(
            "the largest step does not fit beside the weights: lower max_num_batched_tokens, max_num_seqs or "
            "max_model_len, take a smaller or quantised model, a device with more memory or several that share it "
            f"(tensor_parallel_size), and for two models a device each (devices) ({error})"
        ) from None
    found = {device: memory_of(device, cache[device], weights[device]) for device in devices}
    for device, memory in found.items():
        beside = (memory.needed - weights[device]) / GIB
        _log.info("largest steps: run in %.1f s (%.2f GiB on %s for them)", time.monotonic() - began, beside, device)
    for ranks in others:
        for leading, theirs in ranks.memory():
            own = numbered(leading)
            if theirs.room < found[own].room:
                found[own] = theirs
    return found


def forget_peak(device: torch.device) -> int:
    """Returns the bytes that are taken now, by weights."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def memory_of(device: torch.device, cache: int, weights: int) -> GpuMemory:
    """What was taken at most since `forget_peak`, less the bytes of a cache that will not be there."""
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    steps = torch.cuda.max_memory_reserved(device) - cache - weights
    needed = weights + steps + int(SPARE_SHARE * steps) + SPARE_BYTES
    torch.cuda.empty_cache()
    return GpuMemory(total, needed, beside)


def _run(
    make_step: Callable[[Sequence[KVPool]], DeviceStep], decoders: Sequence[Decoder], largest: Largest
) -> dict[torch.device, int]:
    """Returns the bytes of the cache that it ran in, on each device."""
    size = largest.block_size
    step = make_step([KVPool(each.arch, NUM_BLOCKS, size, each.dtype, each.device) for each in decoders])
    step.graphs.is_patient = False
    with collector_paused():
        for plan in largest_plans(largest):
            step.launch(plan)()
    taken: dict[torch.device, int] = {}
    for each in decoders:
        device = numbered(each.device)
        taken[device] = taken.get(device, 0) + NUM_BLOCKS * bytes_per_block(each.arch, size, each.dtype)
    return taken
