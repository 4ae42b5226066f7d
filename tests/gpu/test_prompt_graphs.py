"""Steps with prompts, captured when a size comes again: the tokens of an engine without graphs, in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine, step_of, tokens

# Prompts that come one after the other while others decode: seats for few, pieces of 64 rows. Of the long one, many
# steps are launched that draw nothing, and nobody waits for them: their numbers must not overtake each other.
PROMPTS = [[7 * index % 90 + 5 for index in range(start, start + length)] for start, length in
           [(2, 480), (0, 40), (3, 130), (9, 64), (1, 2), (4, 200), (8, 33), (0, 90), (3, 130)]]  # fmt: skip
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    "params", [{"seed": 3}, {"seed": 4, "top_p": 0.8}, {"n": 2, "seed": 5}, {"seed": 6, "repetition_penalty": 1.2}]
)
def test_graphs_change_no_token(make_checkpoint: CheckpointMaker, params: dict[str, Any]) -> None:
    folder = make_checkpoint("llama")
    captured, eager = engine(folder, "bfloat16", **SMALL), engine(folder, "bfloat16", enforce_eager=True, **SMALL)
    for _ in range(2):
        drawn = tokens(captured, PROMPTS, max_tokens=24, **params)
    kinds = [key for key in step_of(captured).graphs.captured if isinstance(key, tuple) and "with prompts" in key]
    assert kinds, "steps with prompts were captured"
    assert drawn == tokens(eager, PROMPTS, max_tokens=24, **params)
