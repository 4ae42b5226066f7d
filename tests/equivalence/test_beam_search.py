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
from tests.beam_oracle import Tokens, Weights, oracle
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
        ours = [(list(beam.token_ids), beam.score or 0.0) for beam in output.outputs]
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


def test_the_default_models_beams_equal_transformers(default_gguf: Path) -> None:
    """Two searches beside ordinary samples, in one batch."""
    llm = LLM(str(default_gguf))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    ).eval()
    texts = ["The capital of France is", "def fibonacci(n):\n"]
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    beams = SamplingParams(strategy="beam_search", n=4, beam_width=4, max_tokens=12)
    sampled = SamplingParams(n=3, max_tokens=12, seed=1, temperature=0.8)
    outputs = llm.generate([*texts, texts[0]], [beams, beams, sampled], use_tqdm=False)
    ends = sorted(llm.core.eos_token_ids)
    expected = [reference_beams(reference, prompt, width=4, max_tokens=12, end_token_ids=ends) for prompt in ids]
    assert differences(outputs[:2], expected) == 0
    alone = llm.generate(texts[0], sampled, use_tqdm=False)[0]
    assert [beam.token_ids for beam in outputs[2].outputs] == [beam.token_ids for beam in alone.outputs]


# -- what transformers does not do: against the formula written out ----------------------------------------------


def weights_of(reference: Any, prompt: list[int], change: Any = lambda _tokens, logits: logits) -> Weights:
    """log_softmax of the reference's logits after prompt and output, changed on the way."""
    known: dict[Tokens, list[float]] = {}

    def weights(tokens: Tokens) -> list[float]:
        if tokens not in known:
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
            known[tokens] = change(tokens, logits).log_softmax(-1).tolist()
        return known[tokens]

    return weights


def assert_follows(output: RequestOutput, expected: list[tuple[Tokens, float]]) -> None:
    assert [beam.token_ids for beam in output.outputs] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in output.outputs] == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.mark.parametrize(("width", "groups", "penalty"), [(4, 2, 0.7), (6, 3, 1.3), (4, 4, 0.4), (6, 2, 0.0)])
def test_group_beams_equal_the_formula(llm: LLM, reference: Any, width: int, groups: int, penalty: float) -> None:
    asked = prompts(3, 100 + width)
    params = SamplingParams(
        strategy="beam_search",
        n=width,
        beam_width=width,
        num_beam_groups=groups,
        diversity_penalty=penalty,
        max_tokens=6,
    )
    outputs = llm.generate(asked, params, use_tqdm=False)
    for prompt, output in zip(asked, outputs, strict=True):
        expected = oracle(
            weights_of(reference, prompt),
            beam_width=width,
            num_groups=groups,
            diversity_penalty=penalty,
            longest_output=6,
            end_token_ids=frozenset(END_TOKENS),
            length_penalty=1.0,
            early_stopping=False,
        )
        if penalty:
            assert_follows(output, expected)
        else:  # groups are copies of each other: which of two equal outputs comes first is nobody's business
            assert sorted(beam.token_ids for beam in output.outputs) == sorted(tokens for tokens, _ in expected)
        raw = weights_of(reference, prompt)
        for beam in output.outputs:  # the penalty is in the score, and not in the sum of logprobs
            own = sum(raw(beam.token_ids[:position])[token] for position, token in enumerate(beam.token_ids))
            assert beam.cumulative_logprob == pytest.approx(own, abs=1e-3)


def test_beams_score_the_processed_distribution_renormalised(llm: LLM, reference: Any) -> None:
    """Bias, repetition penalty, a caller's processor and top-k at once, in the order of the sampler."""
    prompt = prompts(1, 55)[0]

    def change(tokens: Tokens, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[11] += 2.0
        for token in {*prompt, *tokens}:
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        logits[::2] -= 0.5
        return logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)

    def processor(_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[::2] -= 0.5
        return logits

    params = SamplingParams(
        strategy="beam_search",
        n=5,
        beam_width=5,
        max_tokens=7,
        logit_bias={11: 2.0},
        repetition_penalty=1.3,
        top_k=20,
        logits_processors=[processor],
    )
    expected = oracle(
        weights_of(reference, prompt, change),
        beam_width=5,
        num_groups=1,
        diversity_penalty=0.0,
        longest_output=7,
        end_token_ids=frozenset(END_TOKENS),
        length_penalty=1.0,
        early_stopping=False,
    )
    assert_follows(llm.generate([prompt], params, use_tqdm=False)[0], expected)


def test_stop_ids_end_a_beam_and_min_tokens_hold_it_back(llm: LLM, reference: Any) -> None:
    prompt = prompts(1, 66)[0]
    stops = [5, 13, 21, 29, 37]
    params = SamplingParams(
        strategy="beam_search", n=3, beam_width=3, max_tokens=8, ignore_eos=True, stop_token_ids=stops, min_tokens=4
    )
    output = llm.generate([prompt], params, use_tqdm=False)[0]

    def change(tokens: Tokens, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor(stops), -torch.inf) if len(tokens) < 4 else logits

    expected = oracle(
        weights_of(reference, prompt, change),
        beam_width=3,
        num_groups=1,
        diversity_penalty=0.0,
        longest_output=8,
        end_token_ids=frozenset(stops),
        length_penalty=1.0,
        early_stopping=False,
    )
    assert_follows(output, expected)
    for beam in output.outputs:
        assert len(beam.token_ids) >= 5 or beam.finish_reason == "length"
        assert beam.stop_reason == (beam.token_ids[-1] if beam.finish_reason == "stop" else None)


def test_beams_report_logprobs_of_their_own_tokens(llm: LLM, reference: Any) -> None:
    prompt = prompts(1, 77)[0]
    params = SamplingParams(strategy="beam_search", n=3, beam_width=3, max_tokens=6, logprobs=2)
    raw = weights_of(reference, prompt)
    for beam in llm.generate([prompt], params, use_tqdm=False)[0].outputs:
        assert beam.logprobs is not None
        assert len(beam.logprobs) == len(beam.token_ids)
        for position, (token, row) in enumerate(zip(beam.token_ids, beam.logprobs, strict=True)):
            expected = raw(beam.token_ids[:position])
            assert row[token].logprob == pytest.approx(expected[token], abs=1e-4)
            assert row[token].rank == 1 + sum(value > expected[token] for value in expected)
            assert set(row) >= set(sorted(range(320), key=lambda index: -expected[index])[:2])
        assert beam.cumulative_logprob == pytest.approx(
            sum(row[token].logprob for token, row in zip(beam.token_ids, beam.logprobs, strict=True)), abs=1e-5
        )


def test_siblings_share_blocks_and_the_prompt_is_computed_once(folder: Path) -> None:
    llm = LLM(str(folder), block_size=4)
    prompt = prompts(1, 3)[0][:1] * 40
    params = SamplingParams(strategy="beam_search", n=8, beam_width=8, max_tokens=12, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False)
    stats = llm.stats()
    assert stats["prompt_tokens_computed"] == 40
    assert stats["blocks_in_use_peak"] <= 10 + 8 * 3
    assert stats["blocks_in_use"] == 0
