"""`logprobs` of given tokens against transformers: over the prefix cache, in pieces, and by two models at once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ramify import LLM, InvalidInputError, OptimalSampling
from tests.conftest import CheckpointMaker

CLOSE = 1e-4
VOCABULARY = 320


@pytest.fixture(scope="module")
def folders(make_checkpoint: CheckpointMaker) -> tuple[Path, Path]:
    return make_checkpoint("qwen3"), make_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> LLM:
    return LLM(str(folders[0]), max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def references(folders: tuple[Path, Path]) -> list[Any]:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return [load(folder, dtype=torch.float32).eval() for folder in folders]


def some_ids(length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(length)]


def rows_before(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> Tensor:
    """(continuation, vocabulary): the reference's logprobs at each of the continuation's places."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *continuation]])).logits[0]
    rows: Tensor = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows


SHARED = some_ids(40, 1)
PROMPTS = [[*SHARED, *some_ids(5, 2)], [*SHARED, *some_ids(9, 3)], some_ids(1, 4), [*SHARED, *some_ids(5, 2)]]
CONTINUATIONS = [some_ids(3, 5), some_ids(1, 6), some_ids(100, 7), some_ids(20, 8)]


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"num_kv_blocks": 9}])
def test_logprobs_ranks_and_alternatives_are_those_of_transformers(
    folders: tuple[Path, Path], references: list[Any], options: dict[str, Any]
) -> None:
    llm = LLM(str(folders[0]), max_num_batched_tokens=64, **options)
    scored = llm.logprobs(PROMPTS, CONTINUATIONS, top_k=3)
    for told, prompt, continuation in zip(scored, PROMPTS, CONTINUATIONS, strict=True):
        rows = rows_before(references[0], prompt, continuation)
        wanted = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert told.token_ids == tuple(continuation)
        assert told.logprobs == pytest.approx(wanted.tolist(), abs=CLOSE)
        assert told.cumulative_logprob == pytest.approx(float(wanted.sum()), abs=CLOSE * len(continuation))
        assert told.ranks == tuple(((rows > wanted[:, None]).sum(-1) + 1).tolist())
        assert told.alternatives is not None
        for row, alternatives in zip(rows, told.alternatives, strict=True):
            assert set(row.topk(3).indices.tolist()) <= set(alternatives)
            assert [each.logprob for each in alternatives.values()] == pytest.approx(
                [float(row[token_id]) for token_id in alternatives], abs=CLOSE
            )


def test_what_prompts_have_in_common_is_computed_once(folders: tuple[Path, Path]) -> None:
    llm = LLM(str(folders[0]))
    choices = [some_ids(2, seed) for seed in range(8)]
    scored = llm.logprobs(SHARED, choices)
    assert [told.num_cached_tokens for told in scored] == [0] + [32] * 7, "whole blocks, in the very first call"
    assert llm.stats()["prompt_tokens_computed"] == 41 + 7 * 9
    assert [told.num_cached_tokens for told in llm.logprobs(SHARED, choices)] == [32] * 8
    assert llm.stats()["generated_tokens"] == 0


def test_the_greedy_continuation_is_told_to_be_that(llm: LLM) -> None:
    from ramify import SamplingParams

    greedy = llm.generate(SHARED, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0].outputs[0]
    told, other = llm.logprobs(SHARED, [list(greedy.token_ids), some_ids(6, 9)])
    assert told.is_greedy
    assert not other.is_greedy
    assert told.alternatives is None
    assert told.cumulative_logprob == pytest.approx(greedy.cumulative_logprob, abs=CLOSE)


def test_what_cannot_be_scored_is_refused_by_name(llm: LLM) -> None:
    for prompts, continuations, top_k, message in (
        ([SHARED] * 2, [[1], [2], [3]], 0, "continuations must be one per prompt"),
        (SHARED, [[]], 0, "continuations must not be empty"),
        (SHARED, [[VOCABULARY]], 0, "continuations"),
        (SHARED, [[1]], -1, "top_k must be"),
        (SHARED, [[1]], 10_000, "top_k must be"),
        ([], [[1]], 0, "one per prompt"),
        ([[]], [[1]], 0, "prompt must not be empty"),
        (SHARED, [[1] * 600], 0, "must fit max_model_len"),
        (SHARED, " text", 0, "no tokenizer"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            llm.logprobs(prompts, continuations, top_k=top_k)
    assert llm.logprobs([], []) == []
    assert len(llm.logprobs(SHARED, [[1]])) == 1, "and the engine goes on"


@pytest.mark.parametrize("budget", [64, 2048])
def test_two_models_are_compared_over_the_whole_vocabulary(
    folders: tuple[Path, Path], references: list[Any], budget: int
) -> None:
    """A small budget splits prompts, and makes pieces of the continuation of 100 tokens."""
    pair = OptimalSampling(str(folders[0]), str(folders[1]), max_num_batched_tokens=budget)
    theirs = [[*prompt, 11, 12] for prompt in PROMPTS]  # each model has a prompt of its own
    for _ in range(2):  # the second time over what the first left in the cache
        scored = pair.logprobs(PROMPTS, CONTINUATIONS, theirs, top_k=2)
        assert len(scored) == len(PROMPTS)
        for told, prompt, theta_prompt, continuation in zip(scored, PROMPTS, theirs, CONTINUATIONS, strict=True):
            p = rows_before(references[0], prompt, continuation).double()
            q = rows_before(references[1], theta_prompt, continuation).double()
            chosen = torch.tensor(continuation)[:, None]
            assert told.teacher.token_ids == told.theta.token_ids == tuple(continuation)
            assert told.teacher.logprobs == pytest.approx(p.gather(1, chosen)[:, 0].tolist(), abs=CLOSE)
            assert told.theta.logprobs == pytest.approx(q.gather(1, chosen)[:, 0].tolist(), abs=CLOSE)
            assert told.forward_kl == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), abs=CLOSE)
            assert told.reverse_kl == pytest.approx((q.exp() * (q - p)).sum(-1).tolist(), abs=CLOSE)
            assert told.theta.alternatives is not None
            assert len(told.theta.alternatives) == len(continuation)
    assert pair.generate([PROMPTS[0]], n=2, max_tokens=3, use_tqdm=False).num_tokens == [3, 3]


def test_a_model_is_no_way_from_itself(folders: tuple[Path, Path]) -> None:
    pair = OptimalSampling(str(folders[0]), str(folders[0]))
    [told] = pair.logprobs(SHARED, [CONTINUATIONS[0]])
    assert told.teacher.logprobs == pytest.approx(told.theta.logprobs, abs=1e-6)
    assert max(*told.forward_kl, *told.reverse_kl) < 1e-6
    assert math.isfinite(told.teacher.cumulative_logprob)
