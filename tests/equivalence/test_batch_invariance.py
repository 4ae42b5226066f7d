"""batch_invariant on a CPU: what a request is answered is the same to the bit alone and in busy schedules."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ramify import LLM, OptimalSampling, SamplingParams
from ramify.errors import UnsupportedError
from tests import bits
from tests.conftest import CheckpointMaker

SIZES = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module", params=[64, 32], ids="heads of {}".format)  # read one by one, on wide vectors; or not
def folder(request: pytest.FixtureRequest, make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama", **SIZES, head_dim=request.param)


def engine(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), max_model_len=256, batch_invariant=True, **{"num_kv_blocks": 256, **options})  # type: ignore[arg-type]


def test_requests_alone_and_in_busy_schedules(folder: Path) -> None:
    numbers = random.Random(1)
    asked = bits.random_requests(24, numbers, vocab_size=300, longest_prompt=90, most_tokens=10)
    llm = engine(folder)
    alone = bits.told_alone(llm, asked)
    bits.check(alone, bits.told_together(llm, asked, numbers, waves=2), asked)
    chunked = engine(folder, max_num_batched_tokens=23, max_num_seqs=9)
    bits.check(alone, bits.told_together(chunked, asked, numbers, waves=2), asked)
    scarce = engine(folder, num_kv_blocks=16, max_num_seqs=16)
    bits.check(alone, bits.told_together(scarce, asked, numbers), asked)
    assert scarce.stats()["preemptions"] > 0


def test_a_callers_processor_keeps_its_bits(folder: Path) -> None:
    llm = engine(folder)
    params = SamplingParams(max_tokens=6, seed=3, logprobs=2, logits_processors=[lambda _, logits: logits / 2])
    [alone] = bits.told_alone(llm, [bits.Asked([5, 6, 7], params)])
    others = bits.random_requests(6, random.Random(0), vocab_size=300, longest_prompt=40, most_tokens=6)
    together = bits.told_together(llm, [bits.Asked([5, 6, 7], params), *others], random.Random(0))
    assert together[0] == alone


def test_two_models(make_checkpoint: CheckpointMaker, folder: Path) -> None:
    """Also what is told of their mixture."""
    theta = make_checkpoint("qwen2")
    both = OptimalSampling(
        str(folder),
        str(theta),
        teacher_top_p=0.9,
        batch_invariant=True,
        max_model_len=128,
        num_kv_blocks=64,
    )
    prompts = [list(range(10, 70)), list(range(10, 50)), [7, 8]]

    def drawn(chosen: list[list[int]]) -> list[object]:
        made = both.generate(chosen, n=2, seed=4, max_tokens=5, temperature=0.8, ignore_eos=True, use_tqdm=False)
        return [*zip(made.generated_ids, made.alpha_history, made.diagnostics["kl_theta"], strict=True)]

    assert [sample for prompt in prompts for sample in drawn([prompt])] == drawn(prompts)


def test_several_ranks_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="tensor_parallel_size must be 1 with batch_invariant, got 2"):
        engine(folder, tensor_parallel_size=2)


def test_torchs_operators_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"batch_invariant needs .* kernels on a CPU.*here enforce_eager"):
        engine(folder, enforce_eager=True)
