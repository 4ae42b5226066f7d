"""Engines on the GPU and what they draw, for the tests beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ramify import LLM, SamplingParams
from ramify.device.step import DeviceStep

OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_kv_blocks": 4096, "max_num_seqs": 64}
# Short, of several blocks, and beginning alike.
PROMPTS = [[5, 6, 7], [9], list(range(10, 150)), list(range(10, 145)), [3, 1] * 40]


def engine(folder: Path, dtype: Literal["float32", "bfloat16"], **options: Any) -> LLM:
    return LLM(str(folder), device="cuda", dtype=dtype, **{**OPTIONS, **options})


def step_of(llm: LLM) -> DeviceStep:
    assert isinstance(llm.core.device, DeviceStep)
    return llm.core.device


def tokens(llm: LLM, prompts: list[list[int]] | None = None, **params: Any) -> list[list[tuple[int, ...]]]:
    """Of every prompt, of every sample."""
    outputs = llm.generate(prompts or PROMPTS, SamplingParams(**params), use_tqdm=False)
    assert not any(output.error for output in outputs)
    assert llm.stats()["blocks_in_use"] == 0
    return [[completion.token_ids for completion in output.outputs] for output in outputs]
