"""Masks of grammars on the GPU: rows with one, beside rows without, draw what the CPU's draw."""

from __future__ import annotations

from typing import Any

import pytest

from ramify import LLM, SamplingParams
from tests.conftest import CheckpointMaker
from tests.gpu.engines import OPTIONS, PROMPTS, engine
from tests.masks import fits, follow_sevenths

STRUCTURE: dict[str, Any] = {"structured_outputs": {"regex": "any"}}
END = 11  # the model names none
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "many": {"n": 4, "seed": 3},
    "reported": {"n": 2, "best_of": 4, "seed": 3, "logprobs": 3},
    "filtered": {"n": 4, "seed": 3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
    "beams": {"n": 3, "strategy": "beam_search", "beam_width": 4},
    "diverse": {"n": 3, "seed": 5, "strategy": "diverse", "diversity_penalty": 1.0},
    "distinct": {"n": 3, "seed": 5, "strategy": "without_replacement"},
}


@pytest.mark.parametrize("way", WAYS)
def test_masked_rows_are_those_of_the_cpu(make_checkpoint: CheckpointMaker, way: str) -> None:
    folder = make_checkpoint("llama")
    params = [
        SamplingParams(max_tokens=20, stop_token_ids=[END], **WAYS[way], **(STRUCTURE if number % 2 == 0 else {}))
        for number in range(len(PROMPTS))
    ]
    found = []
    for llm in (LLM(str(folder), device="cpu", dtype="float32", **OPTIONS), engine(folder, "float32")):
        follow_sevenths(llm)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert not any(output.error for output in outputs)
        for output in outputs[::2]:
            assert all(fits(each.token_ids, llm._intake.vocab_size, [END]) for each in output.outputs)
        found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[0] == found[1]
