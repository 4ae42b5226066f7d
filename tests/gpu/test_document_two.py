"""A model's steps taken by hand on a GPU, prompts and captured decodes, draw what the engine draws there."""

from __future__ import annotations

import pytest

from ramify import EngineConfig, ModelRunner, SamplingParams, Sequence
from tests.conftest import CheckpointMaker
from tests.gpu.engines import OPTIONS, PROMPTS, engine


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_runner_draws_what_the_engine_draws(make_checkpoint: CheckpointMaker, temperature: float) -> None:
    folder = make_checkpoint("qwen3")
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    outputs = engine(folder, "float32").generate(PROMPTS, params, use_tqdm=False)
    runner = ModelRunner(EngineConfig.from_options(model=str(folder), device="cuda", dtype="float32", **OPTIONS))
    seqs = [
        Sequence(str(index), prompt, sampling_params=each)
        for index, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    for step in range(12):
        for seq, token_id in zip(seqs, runner.run(seqs, step == 0), strict=True):
            seq.add_token_id(token_id)
    assert [tuple(seq.output_token_ids) for seq in seqs] == [output.outputs[0].token_ids for output in outputs]
    free = runner.num_free_blocks
    runner.release(seqs)
    assert runner.num_free_blocks > free
