"""What kernels keep of sequences, where telling them of others was broken off: the next ones find nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify import SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.gpu.sampler import KernelSampler
from tests.fake import VOCAB, FakeDevice
from tests.unit.test_interruptions import Line, Lines

ROWS = 4
CHARGED = {"dry_multiplier": 2.0, "dry_allowed_length": 1, "frequency_penalty": 0.5}
OUTPUT = (1, 2, 1, 2, 1)


def draws(first: int, asked: Sequence[dict[str, Any]]) -> list[Draw]:
    """Of requests with numbers from the first on."""
    found = []
    for number, options in enumerate(asked, start=first):
        params = SamplingParams(max_tokens=50, **options)
        demands = Demands(
            params, number=number, seed=number, prompts=((7, 2),), eos_token_ids=frozenset({0}), longest_output=50
        )
        found.append(Draw(str(number), 0, 0, len(OUTPUT), (), demands, OUTPUT))
    return found


def held(sampler: KernelSampler, slots: Sequence[int]) -> list[list[Tensor]]:
    """What the draws in these slots look at."""
    tables = [getattr(sampler._slots.tables, name) for name in ("flags", "penalties", "starts", "seen", "word_lengths")]
    tables += sampler._charges._losses
    return [[table[slot].clone() for table in tables] for slot in slots]


def settled(kernels: KernelSampler, asked: Sequence[Draw]) -> list[list[Tensor]]:
    slots = kernels.settle(asked).tolist()
    assert len(set(slots)) == len(asked)
    return held(kernels, slots)


def test_nothing_is_left_of_sequences_that_others_were_about_to_follow() -> None:
    """At every line while the slots of four, whose repetitions are charged, are given to four others."""
    before, interrupted = draws(0, [CHARGED] * ROWS), draws(10, [{"presence_penalty": 1.0}] * ROWS)
    later = draws(20, [CHARGED, *[{"frequency_penalty": 0.1 * number} for number in range(1, ROWS)]])
    truth = settled(KernelSampler(ROWS, VOCAB, torch.device("cpu"), "raw"), later)
    for place in count():
        kernels = KernelSampler(ROWS, VOCAB, torch.device("cpu"), "raw")
        device = FakeDevice(8, 4, max_num_seqs=ROWS, kernels=kernels)
        kernels.settle(before)
        passed = -1

        def act(_line: Line, place: int = place) -> None:
            nonlocal passed
            passed += 1
            if passed == place:
                raise KeyboardInterrupt

        try:
            with Lines(act):
                kernels.settle(interrupted)
        except KeyboardInterrupt:
            device.reset()
        else:
            assert place > 50
            return
        for found, expected in zip(settled(kernels, later), truth, strict=True):
            assert all(map(torch.equal, found, expected)), place
    pytest.fail("it came to no end")
