"""Shared prefixes read once or by every row: the same tokens in float32; in bfloat16 all but a few, at near-ties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers

from ramify import SamplingParams
from ramify.gpu.gpu_layers import GpuLayers
from tests.conftest import CheckpointMaker
from tests.equal import race
from tests.gpu.engines import engine, step_of, tokens

PROMPTS = [list(range(10, 206)), list(range(10, 180)), [7, 8, 9] * 50]
PARAMS = {"n": 16, "seed": 11, "max_tokens": 64}
# Where outputs part, the winner's lead over the next may be as large as two roundings of a logit, with and without.
BFLOAT16_MARGIN = 0.1


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint(request.param)


def drawn(folder: Path, dtype: Literal["float32", "bfloat16"], fewest: int) -> list[list[tuple[int, ...]]]:
    """Prefixes that save at least so many reads are read once for all sharers."""
    llm = engine(folder, dtype)
    for lane in step_of(llm).lanes:
        assert isinstance(lane.layers, GpuLayers)
        lane.layers.sharing = replace(lane.layers.sharing, fewest_positions=fewest)
    return tokens(llm, PROMPTS, **PARAMS)


def test_sharing_changes_no_token_in_float32(folder: Path) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    assert drawn(folder, "float32", 1) == drawn(folder, "float32", 10**9)


def test_sharing_changes_few_outputs_in_bfloat16_and_these_at_near_ties(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = drawn(folder, "bfloat16", 1)
    alone = drawn(folder, "bfloat16", 10**9)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
    margins = []
    for prompt, ours, theirs in zip(PROMPTS, shared, alone, strict=True):
        for child, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            place = next((place for place in range(len(one)) if one[place] != other[place]), None)
            if place is None:
                continue
            ids = torch.tensor([[*prompt, *one[:place]]], device="cuda")
            with torch.no_grad():
                logits = model(ids).logits[0, -1].tolist()
            margins.append(race(logits, (PARAMS["seed"], child, place))[1])
    count = len(PROMPTS) * PARAMS["n"]
    with capsys.disabled():
        print(f"\n{folder.name}: {len(margins)} of {count} outputs differ, margins {[round(x, 4) for x in margins]}")
    assert all(margin < BFLOAT16_MARGIN for margin in margins)
    assert len(margins) < count // 2


def test_equal_prompts_that_come_together_read_what_is_written(make_checkpoint: CheckpointMaker) -> None:
    """All but the first begin behind blocks that the same step computes, and have one row each. What another prompt
    left in these blocks must not show: with heads of 64, a kernel reads shared ones before they are written."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_checkpoint("llama", **sizes, max_position_embeddings=1536)
    llm = engine(folder, "bfloat16", max_model_len=1536, num_kv_blocks=96)
    prompt, other = [5 + place * 7 % 200 for place in range(1025)], [9 + place * 3 % 100 for place in range(1025)]
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=10)
    for _ in range(3):
        llm.generate([other], asked, use_tqdm=False)
        llm.reset_prefix_cache()
        told = []
        for output in llm.generate([prompt] * 8, asked, use_tqdm=False):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            told.append({token_id: each.logprob for token_id, each in logprobs[0].items()})
        llm.reset_prefix_cache()
        # With the last 64 positions of the other prompt, the likeliest tokens are off by 0.13 to 0.25.
        first, *others = told
        assert all(
            abs(first[each] - own[each]) < BFLOAT16_MARGIN for own in others for each in first.keys() & own.keys()
        )
