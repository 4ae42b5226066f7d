"""Speculation on a CPU's kernels: requests of all kinds get the same tokens with drafts and without."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, InvalidInputError, ModelConfig, OptimalSampling, SamplingParams, UnsupportedError
from ramify.drive.draft_model import DraftModel
from ramify.engine.core import EngineCore
from ramify.models.loader import ModelLoader
from tests import bits
from tests.conftest import CheckpointMaker

VOCABULARY = 320


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama")


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), max_model_len=256, num_kv_blocks=512, **options)


def repeating_requests(count: int, numbers: random.Random) -> list[bits.Asked]:
    """Of all kinds, with few tokens to choose from, so that what was written before is written again."""
    asked = bits.random_requests(count, numbers, vocab_size=VOCABULARY, longest_prompt=60, most_tokens=24)
    few = [numbers.randrange(VOCABULARY) for _ in range(4)]
    return [
        bits.Asked(prompt, replace(params, allowed_token_ids=few[: numbers.randint(1, 4)]))
        if numbers.random() < 0.7
        else bits.Asked(prompt, params)
        for prompt, params in asked
    ]


@pytest.mark.parametrize("speculation", [pytest.param("ngram", marks=pytest.mark.long), "suffix"])
def test_bits_are_the_same_with_drafts_where_they_are_batch_invariant(folder: Path, speculation: str) -> None:
    """Tokens, logprobs and ranks; with one request at a time, and with many beside each other."""
    numbers = random.Random(3)
    asked = repeating_requests(12, numbers)
    plain = bits.told_alone(engine(folder, batch_invariant=True), asked)
    drafting = engine(folder, batch_invariant=True, speculation=speculation)
    bits.check(plain, bits.told_alone(drafting, asked), asked)
    bits.check(plain, bits.told_together(drafting, asked, numbers), asked)
    stats = drafting.stats()
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_a_thousand_requests_get_the_same_tokens(folder: Path, speculation: str) -> None:
    """Many at a time without drafts, a few at a time with them."""
    numbers = random.Random(4)
    asked = repeating_requests(500, numbers)
    plain = [tokens(told) for told in bits.told_together(engine(folder), asked, numbers, waves=8)]
    drafting = engine(folder, speculation=speculation)
    drafted = [tokens(told) for told in bits.told_together(drafting, asked, numbers, waves=250)]
    assert plain == drafted
    assert drafting.stats()["accepted_tokens"] > 100


def tokens(told: list[Any]) -> list[tuple[int, ...]]:
    return [token_ids for token_ids, *_ in told[1]]


# -- models that draft -----------------------------------------------------------------------------------------------


def cheap(core: EngineCore) -> EngineCore:
    """Where the model that drafts is as large as what it drafts for, it would soon be given up."""
    assert core.scheduler.speculation is not None
    drafter = core.scheduler.speculation.drafter
    assert isinstance(drafter, DraftModel)
    drafter.cost = 0.05
    return core


def test_a_draft_model_changes_no_bit(folder: Path) -> None:
    """Drafts of the same model are right wherever they are drawn from the same logits: here, everywhere."""
    numbers = random.Random(5)
    asked = bits.random_requests(10, numbers, vocab_size=VOCABULARY, longest_prompt=60, most_tokens=24)
    plain = bits.told_alone(engine(folder, batch_invariant=True), asked)
    drafting = engine(folder, batch_invariant=True, speculation=str(folder))
    cheap(drafting.core)
    bits.check(plain, bits.told_alone(drafting, asked), asked)
    alone = drafting.stats()
    assert alone["accepted_tokens"] == alone["drafted_tokens"] > 0
    bits.check(plain, bits.told_together(drafting, asked, numbers), asked)


def test_a_draft_model_with_fewer_entries_is_asked_for_none_that_it_lacks(
    default_gguf: Path, make_checkpoint: CheckpointMaker
) -> None:
    """As checkpoints of one family have: a prompt with such an entry broke the step, for every request."""
    tokenizer = ModelLoader(ModelConfig(model=str(default_gguf))).load_tokenizer()
    assert tokenizer is not None
    target, draft = (make_checkpoint("llama", vocab_size=size, num_hidden_layers=1) for size in (49_280, 49_152))
    for made in (target, draft):
        tokenizer.backend.save(str(made / "tokenizer.json"))
    prompts = [[1, 2, 3], [1, 49_200, 3], [4, 5]]
    params = [
        SamplingParams(max_tokens=12, seed=1),
        SamplingParams(max_tokens=12, seed=2),
        SamplingParams(max_tokens=12, seed=3, logit_bias={49_210: 8.0}, repetition_penalty=1.1),
    ]
    told = []
    for speculation in (None, str(draft)):
        llm = engine(target, speculation=speculation)
        if speculation is not None:
            cheap(llm.core)
        told.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
    assert told[0] == told[1]
    assert llm.stats()["drafted_tokens"] > 0


def test_the_student_drafts_for_the_mixture(folder: Path, make_checkpoint: CheckpointMaker) -> None:
    """A student close to the teacher's weight 0 drafts what is drawn; alphas and tokens are those without drafts."""
    theta = make_checkpoint("qwen2")
    options: dict[str, Any] = {"alpha_method": "fixed", "alpha": 0.1, "max_model_len": 128, "num_kv_blocks": 128}
    told = []
    for speculation in (None, "student"):
        both = OptimalSampling(str(folder), str(theta), speculation=speculation, batch_invariant=True, **options)
        if speculation is not None:
            cheap(both.core)
        prompts = [list(range(10, 60)), [7, 8]]
        outputs = both.generate(
            prompts, [[5, *prompt] for prompt in prompts], n=1, seed=3, max_tokens=20, use_tqdm=False
        )
        told.append((outputs.generated_ids, outputs.alpha_history, outputs.diagnostics))
    assert told[0] == told[1]
    stats = both.stats()["engine"]
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]


def test_what_cannot_draft_is_refused_by_name(folder: Path, make_checkpoint: CheckpointMaker) -> None:
    other = make_checkpoint("llama", vocab_size=300)
    with pytest.raises(InvalidInputError, match="'student' is for OptimalSampling"):
        engine(folder, speculation="student")
    with pytest.raises(InvalidInputError, match=r"speculation must be 'ngram', 'suffix', or a model that drafts"):
        engine(folder, speculation="suffixes")
    with pytest.raises(InvalidInputError, match="must have the tokenizer of the model that it drafts for"):
        engine(folder, speculation=str(other))
    with pytest.raises(InvalidInputError, match="speculation must be 'student', 'ngram', 'suffix' or None"):
        OptimalSampling(str(folder), str(folder), speculation=str(folder))
    with pytest.raises(UnsupportedError, match="needs tensor_parallel_size 1"):
        OptimalSampling(str(folder), str(folder), speculation="student", tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match=r"draft model .* cannot sleep"):
        engine(folder, speculation=str(folder)).sleep()
