"""Every graph that decodes may need, captured before the first request: no step waits for one later."""

from __future__ import annotations

import time
from collections.abc import Callable

from ramify.device.graphs import padded
from ramify.device.rehearsal import IN_A_GRAPH, Largest, plan_of
from ramify.device.step import DeviceStep
from ramify.engine.plan import Plan, SharedPrefix

SECONDS_BETWEEN_LINES = 1.0
CONTEXT = 1_040  # positions of each sequence: sharing them is worth it for two


def warm_up(
    step: DeviceStep,
    largest: Largest,
    num_blocks: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs decodes of every padded size, alone and sharing a prefix, and draws of every kind, in an unused cache.

    Says how far it is once a second or so, and when it is done.
    """
    counts = numbers_of_sequences(largest)
    began = said = clock()
    for done, count in enumerate(counts):
        if done == 0 or clock() - said >= SECONDS_BETWEEN_LINES:
            said = clock()
            say(f"Captured {done} of {len(counts)} sizes of CUDA graphs")
        for is_shared in (False, True) if count > 1 else (False,):
            step.launch(decodes(largest, count, num_blocks, is_shared=is_shared))()
        step.capture_draws(count)
    step.reset()
    say(f"Captured all {len(counts)} sizes of CUDA graphs in {clock() - began:.1f} s")


def numbers_of_sequences(largest: Largest) -> list[int]:
    """Enough numbers for every combination of a model's padded rows and padded draws to occur, the largest first.

    What is captured first takes memory that all later ones take again.
    """
    rows_each = largest.num_tracks // largest.num_models
    shapes = {(padded(count), padded(count * rows_each)): count for count in range(1, largest.max_num_seqs + 1)}
    return sorted(shapes.values(), reverse=True)


def decodes(largest: Largest, count: int, num_blocks: int, *, is_shared: bool) -> Plan:
    """So many sequences, a token each."""
    end = min(CONTEXT, largest.max_model_len)
    plan = plan_of(largest, count, 1, IN_A_GRAPH, end=end, num_blocks=num_blocks)
    leading = (end - 1) // largest.block_size
    if is_shared and leading:
        for work in plan.works:
            work.shared.append(SharedPrefix(leading, tuple(range(len(work.chunks)))))
    return plan
