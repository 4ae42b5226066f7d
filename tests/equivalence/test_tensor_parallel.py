"""A model that ranks share gives what one rank gives: tokens, and logprobs to the fifth digit.

Ranks are threads here (tests/ranks.py), and processes where their start and their end is what matters.
"""

from __future__ import annotations

import _thread
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ramify import LLM, OptimalSampling, RequestOutput, SamplingParams
from ramify.device.step import DeviceStep
from ramify.errors import EngineLostError, ModelError, WeightsError
from ramify.parallel.leading import LeadingLayers
from tests.conftest import CheckpointMaker
from tests.equivalence.test_gguf_families import write_gguf
from tests.ranks import RankThread, rank_threads  # noqa: F401 - a fixture

PROMPTS = [[(7 * place + 3 * number) % 300 for place in range(5 + 9 * number)] for number in range(4)]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 96, "block_size": 4, "seed": 5}
PARAMS = [
    SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=11, max_tokens=6, logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=2),
    SamplingParams(strategy="beam_search", beam_width=3, n=2, max_tokens=5),
    SamplingParams(n=2, repetition_penalty=1.2, seed=3, max_tokens=6),
]


def check_equal(shared: Sequence[RequestOutput], alone: Sequence[RequestOutput]) -> None:
    for one, other in zip(shared, alone, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        for own, expected in zip(one.outputs, other.outputs, strict=True):
            assert own.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=2e-5)
        for place, entry in enumerate(other.prompt_logprobs or []):
            if entry is not None:
                assert one.prompt_logprobs is not None
                found = one.prompt_logprobs[place]
                assert found is not None
                assert {key: value.logprob for key, value in found.items()} == pytest.approx(
                    {key: value.logprob for key, value in entry.items()}, abs=1e-5
                )


def outputs_of(llm: LLM) -> list[RequestOutput]:
    """Prompts in chunks, groups that share theirs, and the same prompts again, found in the prefix cache."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.stats()["prompt_tokens_cached"] > 0
    return outputs + again


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 317},  # the last rank has fewer tokens
    "qwen3": {},
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_ranks_equal_one_rank(
    family: str,
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    """Two ranks on the compiled kernels; four, more than key-value heads, on torch's operators."""
    folder = str(make_checkpoint(family, **FAMILIES[family]))
    options = {**OPTIONS, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    expected = outputs_of(LLM(folder, **options))
    for size, enforce_eager in ((2, False), (4, True)):
        rank_threads.clear()
        shared = LLM(folder, tensor_parallel_size=size, enforce_eager=enforce_eager, **options)
        check_equal(outputs_of(shared), expected)
        assert len(rank_threads) == size - 1
        assert shared.architecture.num_heads == 4


def test_preempted_and_swapped_blocks_move_on_every_rank(
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    folder = str(make_checkpoint("llama"))
    options = {**OPTIONS, "num_kv_blocks": 14, "preemption_mode": "swap", "swap_space": 0.01, "max_model_len": 56}
    params = SamplingParams(n=3, temperature=0.9, seed=2, max_tokens=14)
    alone = LLM(folder, **options)
    expected = alone.generate(PROMPTS[:2], params, use_tqdm=False)
    assert alone.stats()["preemptions"] > 0
    shared = LLM(folder, tensor_parallel_size=2, **options)
    check_equal(shared.generate(PROMPTS[:2], params, use_tqdm=False), expected)
    assert shared.stats()["preemptions"] > 0
    assert "Move" in rank_threads[0].orders


@pytest.mark.parametrize("inner", [128, 96], ids=["whole blocks", "cut blocks"])
def test_quantised_weights_are_shared_as_they_are(
    inner: int,
    make_checkpoint: CheckpointMaker,
    tmp_path: Path,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    """Rows and columns of blocks, Llama's rotary pairs, a tied head. 48 columns of down cut through blocks of 32."""
    folder = make_checkpoint("llama", intermediate_size=inner, head_dim=32, tie_word_embeddings=True)
    path = tmp_path / "model.gguf"
    config = transformers.AutoConfig.from_pretrained(folder)
    write_gguf(folder, path, config, gguf.GGMLQuantizationType.Q8_0)
    params = SamplingParams(n=2, seed=1, max_tokens=6, detokenize=False)
    alone, shared = (
        LLM(str(path), tensor_parallel_size=size, **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
        for size in (1, 2)
    )
    check_equal(shared, alone)
    assert rank_threads


def test_two_models_share_their_ranks(
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    teacher, theta = str(make_checkpoint("qwen3", num_hidden_layers=2)), str(make_checkpoint("llama"))
    found = [
        OptimalSampling(teacher, theta, tensor_parallel_size=size, **OPTIONS).generate(
            PROMPTS[:2], n=2, max_tokens=5, seed=4, temperature=0.9
        )
        for size in (1, 2)
    ]
    assert found[0].generated_ids == found[1].generated_ids
    for one, other in zip(found[0].alpha_history, found[1].alpha_history, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert len(rank_threads) == 1


def test_random_weights_are_the_same_model_on_any_number_of_ranks(
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    folder = str(make_checkpoint("qwen2"))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    alone, shared = (
        LLM(folder, load_format="dummy", tensor_parallel_size=size, **OPTIONS).generate(
            PROMPTS[:2], params, use_tqdm=False
        )
        for size in (1, 2)
    )
    check_equal(shared, alone)
    assert rank_threads


def test_ctrl_c_in_a_step_leaves_the_ranks_together(
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(make_checkpoint("llama"))
    params = SamplingParams(n=2, seed=1, max_tokens=8)
    expected = LLM(folder, **OPTIONS).generate(PROMPTS[:2], params, use_tqdm=False)
    shared = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    (other,) = rank_threads
    send = other.send

    def interrupting(line: bytes) -> None:
        send(line)
        if other.orders[-1] == "Forward" and other.orders.count("Forward") == 3:
            _thread.interrupt_main()

    monkeypatch.setattr(other, "send", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it may be ignored
    with pytest.raises(KeyboardInterrupt):
        shared.generate(PROMPTS[:2], params, use_tqdm=False)
    signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(other, "send", send)
    check_equal(shared.generate(PROMPTS[:2], params, use_tqdm=False), expected)


def test_a_rank_that_dies_ends_the_engine_with_its_name(make_checkpoint: CheckpointMaker) -> None:
    """Processes, as users have them: first they give what one rank gives."""
    folder = str(make_checkpoint("llama"))
    params = SamplingParams(n=2, seed=1, max_tokens=4)
    expected = LLM(folder, **OPTIONS).generate(PROMPTS[:2], params, use_tqdm=False)
    shared = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    check_equal(shared.generate(PROMPTS[:2], params, use_tqdm=False), expected)
    assert isinstance(shared.core.device, DeviceStep)
    layers = shared.core.device.lanes[0].layers
    assert isinstance(layers, LeadingLayers)
    os.kill(layers.team.pids[0], signal.SIGKILL)
    for _ in range(2):  # at once, and from then on
        with pytest.raises(EngineLostError, match=r"rank 1 of 2 was ended by SIGKILL; make a new engine"):
            shared.generate(PROMPTS[:2], params, use_tqdm=False)


def test_weights_are_replaced_on_every_rank(
    make_checkpoint: CheckpointMaker,
    rank_threads: list[RankThread],  # noqa: F811
) -> None:
    """As a training loop has them, whole; on kernels and on torch's operators; refused as one rank refuses them."""
    folders = [make_checkpoint("llama", attention_bias=True, mlp_bias=True, num_hidden_layers=2) for _ in range(2)]
    params = SamplingParams(n=2, seed=1, max_tokens=6)
    weights = {name: tensor * 1.1 for name, tensor in load_file(folders[1] / "model.safetensors").items()}
    alone = LLM(str(folders[0]), **OPTIONS)
    before = alone.generate(PROMPTS, params, use_tqdm=False)
    alone.load_weights(weights.items())
    expected = alone.generate(PROMPTS, params, use_tqdm=False)
    for enforce_eager in (False, True):
        shared = LLM(str(folders[0]), tensor_parallel_size=2, enforce_eager=enforce_eager, **OPTIONS)
        check_equal(shared.generate(PROMPTS, params, use_tqdm=False), before)
        for wrong in (
            {"lm_head.weight": torch.zeros(3, 4)},
            {"strange": torch.zeros(2)},
            dict(list(weights.items())[:3]),
        ):
            with pytest.raises(WeightsError):
                shared.load_weights(wrong.items())
            with pytest.raises(WeightsError, match="broke off"):
                shared.generate(PROMPTS, params, use_tqdm=False)
        shared.load_weights(weights.items())
        check_equal(shared.generate(PROMPTS, params, use_tqdm=False), expected)
    assert "Replace" in rank_threads[0].orders


def test_a_rank_that_never_comes_is_not_waited_for(
    make_checkpoint: CheckpointMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "child.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr("ramify.parallel.team._PROGRAM", program)
    with pytest.raises(ModelError, match=r"not all ranks could be started: rank 1 of 2 ended with status 3"):
        LLM(str(make_checkpoint("llama")), tensor_parallel_size=2, **OPTIONS)


def test_a_rank_that_cannot_load_is_told(make_checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may not see the files that this process sees."""
    folder = make_checkpoint("llama")
    elsewhere = {"model": str(folder / "gone")}
    monkeypatch.setattr("ramify.parallel.start._options", lambda loader, config: elsewhere)  # noqa: ARG005
    with pytest.raises(ModelError, match=r"not all ranks could be started: rank 1 of 2: ModelNotFoundError"):
        LLM(str(folder), tensor_parallel_size=2, **OPTIONS)
