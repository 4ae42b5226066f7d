"""Beam search inside the engine against `transformers`' own, token for token and score for score."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ramify import LLM, RequestOutput, SamplingParams
from tests.conftest import CheckpointMaker

END_TOKENS = list(range(0, 320, 24))  # many, so that beams end early, late and not at all
WIDTHS = [2, 3, 4, 5, 7, 8, 11, 16]
RULES = [True, False, "never"]
PENALTIES = [0.0, 1.0, 2.0]


def prompts(number: int, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(320) for _ in range(numbers.randint(1, 40))] for _ in range(number)]


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama", eos_token_id=END_TOKENS, initializer_range=0.2)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_beams(
    model: Any, prompt: Sequence[int], *, width: int, max_tokens: int, end_token_ids: list[int], **options: Any
) -> list[tuple[list[int], float]]:
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=end_token_ids or None,
            pad_token_id=-1 if not end_token_ids else end_token_ids[0],
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    beams = []
    for sequence, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        ends = [place for place, token in enumerate(output) if token in end_token_ids]
        beams.append((output[: ends[0] + 1] if ends else output, score))
    return beams


def differences(outputs: Sequence[RequestOutput], expected: Sequence[list[tuple[list[int], float]]]) -> int:
    """Asserts equality; returns how many searches parted from the reference where two of its scores nearly tie."""
    parted = 0
    for output, beams in zip(outputs, expected, strict=True):
        ours = [(list(item.token_ids), item.score or 0.0) for item in output.outputs]
        assert len(ours) == len(beams)
        if [tokens for tokens, _ in ours] == [tokens for tokens, _ in beams]:
            assert [score for _, score in ours] == pytest.approx([score for _, score in beams], abs=1e-4)
        else:
            parted += 1
    return parted


@pytest.mark.parametrize("early_stopping", RULES)
@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_beams_equal_transformers_in_every_width(
    llm: LLM, reference: Any, length_penalty: float, early_stopping: Any
) -> None:
    """All widths and prompts at once in our engine, each alone in the reference."""
    asked = [(prompt, width) for width in WIDTHS for prompt in prompts(4, width)]
    params = [
        SamplingParams(
            strategy="beam_search",
            n=width,
            beam_width=width,
            max_tokens=20,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        for _, width in asked
    ]
    outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    expected = [
        reference_beams(
            reference,
            prompt,
            width=width,
            max_tokens=20,
            end_token_ids=END_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        for prompt, width in asked
    ]
    assert differences(outputs, expected) == 0
    assert llm.stats()["blocks_in_use"] == 0
