"""Tiny float32 models: greedy outputs on the GPU are those of the CPU path."""

from __future__ import annotations

import pytest

from ramify import LLM
from tests.conftest import CheckpointMaker
from tests.gpu.engines import OPTIONS, PROMPTS, engine, tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("count", [1, 3, 5], ids="{} prompts".format)
def test_greedy_outputs_are_equal(make_checkpoint: CheckpointMaker, family: str, count: int) -> None:
    """One row, a few and several: each goes through kernels of its own."""
    folder = make_checkpoint(family)
    some = PROMPTS[-count:]
    on_cpu = LLM(str(folder), device="cpu", dtype="float32", **OPTIONS)
    expected = tokens(on_cpu, some, temperature=0, max_tokens=48)
    assert tokens(engine(folder, "float32"), some, temperature=0, max_tokens=48) == expected
