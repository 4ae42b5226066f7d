"""Ctrl-C at lines of host and device step, with a step ahead on its way: the next call gives what it gave before."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine, tokens
from tests.unit.test_interruptions import Line, Lines


def test_an_interrupted_call_leaves_nothing_on_the_gpu(make_checkpoint: CheckpointMaker) -> None:
    llm = engine(make_checkpoint("llama"), "float32")
    params: dict[str, Any] = {"n": 3, "seed": 1, "max_tokens": 20}
    expected = tokens(llm, **params)  # graphs are captured here
    llm.reset_prefix_cache()
    assert tokens(llm, **params) == expected  # and here those of steps with prompts, which have come again
    passed, last = 0, 0

    def act(_line: Line) -> None:
        nonlocal passed
        passed += 1
        if passed == last:
            raise KeyboardInterrupt

    llm.reset_prefix_cache()
    with Lines(act):
        assert tokens(llm, **params) == expected
    total, numbers = passed, random.Random(0)
    for _ in range(40):
        llm.reset_prefix_cache()
        passed, last = 0, numbers.randint(1, total)
        with Lines(act), pytest.raises(KeyboardInterrupt):
            tokens(llm, **params)
        stats = llm.stats()
        assert (stats["running"], stats["waiting"], stats["blocks_in_use"]) == (0, 0, 0)
        llm.reset_prefix_cache()
        assert tokens(llm, **params) == expected
