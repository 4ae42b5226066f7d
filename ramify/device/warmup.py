"""Every graph that a step may need, captured before the first request: no step waits for one later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from ramify.device.graphs import MOST_ROWS_WITH_PROMPTS, Kind, padded, padded_with_prompts
from ramify.device.rehearsal import IN_A_GRAPH, Largest, lengths_of, plan_of
from ramify.device.step import DeviceStep
from ramify.engine.plan import Plan, SharedPrefix, StepResult, Ticket
from ramify.process.garbage import collector_paused

SECONDS_BETWEEN_LINES = 1.0
NAMES: dict[Kind, str] = {
    "decodes": "of decodes",
    "with prompts": "with prompts",
    "logits": "of logits",
    "draws": "of draws",
    "drafts": "of drafts",
}
CONTEXT = 1_040  # positions of each sequence: sharing them is worth it for two
SHARERS = (1, 1)  # what those compute that share a prefix, beside prompts


def warm_up(
    step: DeviceStep,
    largest: Largest,
    num_blocks: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs steps of every padded size, alone and sharing a prefix, and draws of every kind, in an unused cache.

    The largest first: what is captured first takes memory that all later ones take again. Says how far it is once a
    second or so, and when it is done, how many graphs of each kind took how long.
    """
    began = said = clock()
    sizes = rows_with_prompts(largest) if step.captures_prompts else []
    counts = numbers_of_sequences(largest)
    last: Ticket = partial(StepResult, [], [])  # read one behind: the next is captured while the device runs it
    with collector_paused(), step.warming_up():
        for done, rows in enumerate(sizes):
            if done == 0 or clock() - said >= SECONDS_BETWEEN_LINES:
                said = clock()
                say(f"Captured {done} of {len(sizes)} sizes of CUDA graphs with prompts")
            for is_shared in (False, True):
                before, last = last, step.launch(prompts(largest, rows, num_blocks, is_shared=is_shared))
                before()
        for done, count in enumerate(counts):
            if done == 0 or clock() - said >= SECONDS_BETWEEN_LINES:
                said = clock()
                say(f"Captured {done} of {len(counts)} sizes of CUDA graphs")
            for is_shared in (False, True) if count > 1 else (False,):
                before, last = last, step.launch(decodes(largest, count, num_blocks, is_shared=is_shared))
                before()
            step.capture_draws(count)
            if sizes:
                step.capture_logits(count)
    last()
    step.reset()
    made = step.made.items()
    say(
        f"Captured all {len(counts)} sizes of CUDA graphs in {clock() - began:.1f} s: "
        + ", ".join(f"{tally.number} {NAMES[kind]} in {tally.seconds:.1f} s" for kind, tally in made)
    )


def numbers_of_sequences(largest: Largest) -> list[int]:
    """Enough numbers for every combination of a model's padded rows and padded draws to occur, the largest first."""
    counts = range(1, largest.max_num_seqs + 1)
    shapes = {(padded(count), padded(count * largest.rows_each)): count for count in counts}
    return sorted(shapes.values(), reverse=True)


def rows_with_prompts(largest: Largest) -> list[int]:
    """Of one model in a step with prompts: the most of every padded size, the largest first."""
    most = min(
        MOST_ROWS_WITH_PROMPTS,
        largest.max_num_batched_tokens,
        largest.max_num_seqs * largest.max_model_len * largest.rows_each,
    )
    return sorted({padded_with_prompts(rows): rows for rows in range(2, most + 1)}.values(), reverse=True)


def decodes(largest: Largest, count: int, num_blocks: int, *, is_shared: bool) -> Plan:
    """So many sequences, a token each."""
    return _plan(largest, [1] * count, num_blocks, count if is_shared else 0)


def prompts(largest: Largest, num_rows: int, num_blocks: int, *, is_shared: bool) -> Plan:
    """Pieces of prompts that come to so many rows of each model; two decodes that share a prefix among them."""
    lengths = lengths_of(largest, num_rows)
    rest = num_rows - len(SHARERS) * largest.rows_each
    if is_shared and rest > 1 and len(SHARERS) + len(lengths) <= largest.max_num_seqs:
        return _plan(largest, [*SHARERS, *lengths_of(largest, rest)], num_blocks, len(SHARERS))
    return _plan(largest, lengths, num_blocks, 0)


def _plan(largest: Largest, lengths: Sequence[int], num_blocks: int, num_sharers: int) -> Plan:
    """The first `num_sharers` sequences share what they have computed."""
    end = max(min(CONTEXT, largest.max_model_len), *lengths)
    plan = plan_of(largest, lengths, IN_A_GRAPH, end=end, num_blocks=num_blocks)
    leading = (end - 1) // largest.block_size
    if num_sharers and leading:
        for work in plan.works:
            work.shared.append(SharedPrefix(leading, tuple(range(num_sharers * largest.rows_each))))
    return plan
