"""Logprobs against transformers' log_softmax: of outputs and prompts, their ranks, under every way to schedule them."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import LLM, FinishReason, Request, RequestOutput, SamplingParams
from ramify.device.lane import Lane
from ramify.device.prompt_reports import ROWS_AT_ONCE
from ramify.device.reads import Int64s
from ramify.engine.plan import TokenReport
from ramify.engine.search.logprob_rows import LogprobRows
from ramify.outputs import CompletionOutput, LogprobRow
from tests.conftest import CheckpointMaker
from tests.drive import Asked, finish
from tests.fake import fake_engine
from tests.reference_sampler import NEVER, reference_row

CLOSE = 1e-4
VOCABULARY = 320


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("qwen3")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def generate(llm: LLM, asked: Sequence[Any], params: Any = None, **options: Any) -> list[RequestOutput]:
    return llm.generate(asked, params if params is not None else SamplingParams(**options), use_tqdm=False)


def logits_after_each(reference: Any, token_ids: Sequence[int]) -> Tensor:
    """(tokens, vocabulary): row i is what the reference says about token i + 1."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([list(token_ids)])).logits[0].float()
    return logits


def check_row(row: LogprobRow, expected: Tensor, token_id: int, count: int) -> None:
    """One place: the `count` likeliest, the token itself, each with its logprob and its rank in `expected`."""
    assert token_id in row
    by_rank = {entry.rank: identity for identity, entry in row.items()}
    assert set(by_rank) >= set(range(1, count + 1)), "the likeliest have ranks 1, 2, ..."
    assert len(row) == count + (row[token_id].rank > count)
    for identity, entry in row.items():
        logprob = float(expected[identity])
        assert entry.logprob == pytest.approx(logprob, abs=CLOSE)
        # Where the reference's own logprobs nearly tie, either order is right.
        certainly_above = int((expected > logprob + 2 * CLOSE).sum())
        perhaps_above = int((expected > logprob - 2 * CLOSE).sum())
        assert certainly_above < entry.rank <= max(perhaps_above, 1)


def check_completion(completion: CompletionOutput, prompt: Sequence[int], reference: Any, count: int | None) -> None:
    """Logprobs and their sum as the reference has them for these very tokens."""
    token_ids = completion.token_ids
    expected = logits_after_each(reference, [*prompt, *token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
    total = sum(float(expected[place, token_id]) for place, token_id in enumerate(token_ids))
    assert completion.cumulative_logprob == pytest.approx(total, abs=CLOSE * len(token_ids))
    if count is None:
        assert completion.logprobs is None
        return
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(token_ids)
    for place, row in enumerate(completion.logprobs):
        check_row(row, expected[place], token_ids[place], count)


def check_prompt(output: RequestOutput, reference: Any, count: int) -> None:
    rows, prompt = output.prompt_logprobs, output.prompt_token_ids
    assert rows is not None
    assert len(rows) == len(prompt)
    assert rows[0] is None, "nothing says how likely the first token is"
    expected = logits_after_each(reference, prompt).log_softmax(-1)
    for place, row in enumerate(rows[1:], start=1):
        assert row is not None
        check_row(row, expected[place - 1], prompt[place], count)


# -- a tiny model, in all its forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_of_outputs_equal_transformers(llm: LLM, reference: Any, count: int, temperature: float) -> None:
    asked = prompts(1, 7, 33)
    n = 1 if temperature == 0 else 3
    for output in generate(llm, asked, n=n, temperature=temperature, seed=3, max_tokens=9, logprobs=count):
        assert len(output.outputs) == n
        for completion in output.outputs:
            check_completion(completion, output.prompt_token_ids, reference, count)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_of_prompts_equal_transformers(llm: LLM, reference: Any, count: int) -> None:
    for output in generate(llm, prompts(1, 2, 16, 17, 150), max_tokens=2, prompt_logprobs=count):
        check_prompt(output, reference, count)


def test_requests_that_ask_for_different_reports_get_their_own(llm: LLM, reference: Any) -> None:
    asked = prompts(5, 6, 7, 8, 9)
    counts: list[tuple[int | None, int | None]] = [(None, None), (0, 7), (3, None), (11, 0), (None, 2)]
    params = [
        SamplingParams(n=2, seed=1, max_tokens=6, logprobs=count, prompt_logprobs=prompt_count)
        for count, prompt_count in counts
    ]
    for output, (count, prompt_count) in zip(generate(llm, asked, params), counts, strict=True):
        for completion in output.outputs:
            check_completion(completion, output.prompt_token_ids, reference, count)
        if prompt_count is None:
            assert output.prompt_logprobs is None
        else:
            check_prompt(output, reference, prompt_count)


def test_best_of_returns_each_winner_with_its_own_logprobs(llm: LLM, reference: Any) -> None:
    output = generate(llm, prompts(12), n=3, best_of=8, seed=6, max_tokens=7, logprobs=2)[0]
    scores = [completion.cumulative_logprob for completion in output.outputs]
    assert scores == sorted(scores, reverse=True)
    assert [completion.score for completion in output.outputs] == scores
    for completion in output.outputs:
        check_completion(completion, output.prompt_token_ids, reference, 2)


def test_beams_carry_the_logprobs_of_their_own_path(llm: LLM, reference: Any) -> None:
    output = generate(
        llm, prompts(12), strategy="beam_search", n=4, beam_width=4, max_tokens=8, logprobs=3, prompt_logprobs=1
    )[0]
    check_prompt(output, reference, 1)
    for completion in output.outputs:
        check_completion(completion, output.prompt_token_ids, reference, 3)


def test_no_logprobs_asked_is_the_chosen_token_alone_at_zero(llm: LLM) -> None:
    completion = generate(llm, prompts(4), max_tokens=5, seed=1, logprobs=0)[0].outputs[0]
    assert completion.logprobs is not None
    assert [list(row) for row in completion.logprobs] == [[token_id] for token_id in completion.token_ids]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 14, "block_size": 8, "max_num_batched_tokens": 9},
        {"num_kv_blocks": 14, "block_size": 8, "preemption_mode": "swap", "swap_space": 0.01},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_no_engine_option_changes_a_logprob(folder: Path, reference: Any, options: Any) -> None:
    engine = LLM(str(folder), **options)
    asked = prompts(40, 30, 20, seed=4)
    outputs = generate(
        engine, asked, n=3, seed=9, max_tokens=30, temperature=0.8, top_p=0.9, logprobs=2, prompt_logprobs=3
    )
    for output in outputs:
        check_prompt(output, reference, 3)
        for completion in output.outputs:
            check_completion(completion, output.prompt_token_ids, reference, 2)
    assert (engine.stats()["preemptions"] > 0) == ("num_kv_blocks" in options)
    assert engine.stats()["blocks_in_use"] == 0


# -- prompts that are cached, or only scored ----------------------------------------------------------------------


def test_prompt_logprobs_take_no_prefix_hit_and_leave_one_for_others(folder: Path, reference: Any) -> None:
    engine = LLM(str(folder))
    prompt = prompts(100)
    generate(engine, prompt, max_tokens=1)
    before = engine.stats()["prompt_tokens_computed"]
    scored = generate(engine, prompt, max_tokens=4, temperature=0, prompt_logprobs=2)[0]
    assert scored.num_cached_tokens == 0, "a cached prefix has no logits"
    assert engine.stats()["prompt_tokens_computed"] - before == 100
    check_prompt(scored, reference, 2)
    engine.reset_prefix_cache()
    first = generate(engine, prompt, max_tokens=4, temperature=0, prompt_logprobs=2)[0]
    plain = generate(engine, prompt, max_tokens=4, temperature=0)[0]
    assert (first.num_cached_tokens, plain.num_cached_tokens) == (0, 96)
    assert first.outputs[0].token_ids == plain.outputs[0].token_ids == scored.outputs[0].token_ids


@pytest.mark.parametrize("budget", [None, 6])
def test_a_prompt_may_be_scored_and_not_continued(folder: Path, reference: Any, budget: int | None) -> None:
    engine = LLM(str(folder), max_num_batched_tokens=budget)
    asked = prompts(1, 25, 40)
    params = [
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=0, prompt_logprobs=4, logprobs=1),
        SamplingParams(max_tokens=5, seed=1, logprobs=1),
    ]
    outputs = generate(engine, asked, params)
    for output, count in zip(outputs[:2], (0, 4), strict=True):
        check_prompt(output, reference, count)
        completion = output.outputs[0]
        assert len(output.outputs) == 1
        assert (completion.token_ids, completion.text, completion.cumulative_logprob) == ((), "", 0)
        assert completion.finish_reason is FinishReason.LENGTH
        assert output.error is None
    assert outputs[0].outputs[0].logprobs is None
    assert outputs[1].outputs[0].logprobs == []
    check_completion(outputs[2].outputs[0], asked[2], reference, 1)
    assert engine.stats()["generated_tokens"] == 5
    assert engine.stats()["blocks_in_use"] == 0


def test_no_prompt_becomes_one_array_of_all_its_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 tokens times a vocabulary of 150,000 would be 240 MB; a few rows at a time are enough."""
    asked_rows: list[int] = []
    logits = Lane.logits

    def watched(lane: Lane, rows: Int64s) -> Tensor:
        made = logits(lane, rows)
        asked_rows.append(made.shape[0])
        return made

    monkeypatch.setattr(Lane, "logits", watched)
    outputs = generate(llm, prompts(400, 300), max_tokens=1, prompt_logprobs=2)
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [400, 300]
    assert max(asked_rows) <= ROWS_AT_ONCE <= 128
    assert sum(asked_rows) == 399 + 299 + 2


# -- processed logprobs -------------------------------------------------------------------------------------------

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.75},
    {"temperature": 1.0, "min_p": 0.125, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.5, "logit_bias": {7: 4.0, 9: -1.0}},
    {"temperature": 2.0, "allowed_token_ids": list(range(0, VOCABULARY, 5)), "repetition_penalty": 0.75},
]


@pytest.mark.parametrize("n", [1, 2])
def test_processed_logprobs_are_of_what_was_drawn_from(folder: Path, reference: Any, n: int) -> None:
    engine = LLM(str(folder), logprobs_mode="processed")
    mixes = [mix for mix in MIXED if n == 1 or mix["temperature"]]
    params = [SamplingParams(**mix, n=n, seed=5, max_tokens=12, logprobs=20, prompt_logprobs=2) for mix in mixes]
    outputs = generate(engine, prompts(*[9] * len(mixes)), params)
    compared = undecided = 0
    for output, each in zip(outputs, params, strict=True):
        check_prompt(output, reference, 2)  # a prompt was drawn from nothing: its logprobs are the model's
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            token_ids = completion.token_ids
            logits = logits_after_each(reference, [*prompt, *token_ids])[len(prompt) - 1 : -1]
            raw = logits.log_softmax(-1)
            total = sum(float(raw[place, token_id]) for place, token_id in enumerate(token_ids))
            assert completion.cumulative_logprob == pytest.approx(total, abs=CLOSE * len(token_ids))
            for place, row in enumerate(completion.logprobs or ()):
                expected = reference_row(
                    logits[place].tolist(), each, prompt=prompt, output=token_ids[:place], slack=2e-5
                )
                if expected.undecided:
                    undecided += 1
                    continue
                compared += 1
                logprobs = torch.tensor(expected.probabilities).clamp_min(1e-300).log()
                check_row(row, logprobs, token_ids[place], min(20, len(expected.kept)))
                assert set(row) <= expected.kept
    assert compared + undecided == 12 * n * len(mixes)
    assert undecided <= 5


def test_processed_logprobs_of_beams_are_of_what_they_were_chosen_from(folder: Path, reference: Any) -> None:
    engine = LLM(str(folder), logprobs_mode="processed")
    params = SamplingParams(
        strategy="beam_search", n=3, beam_width=3, max_tokens=8, top_k=25, repetition_penalty=1.5, logprobs=6
    )
    output = generate(engine, prompts(9), params)[0]
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        token_ids = completion.token_ids
        logits = logits_after_each(reference, [*prompt, *token_ids])[len(prompt) - 1 : -1]
        weights = []
        for place, row in enumerate(completion.logprobs or ()):
            expected = reference_row(logits[place].tolist(), params, prompt=prompt, output=token_ids[:place])
            check_row(row, torch.tensor(expected.probabilities).clamp_min(1e-300).log(), token_ids[place], 6)
            weights.append(row[token_ids[place]].logprob)
        assert completion.score == pytest.approx(sum(weights) / len(token_ids), abs=CLOSE)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_cumulative_logprob_is_the_models_own_whatever_is_reported(folder: Path, reference: Any, mode: Any) -> None:
    engine = LLM(str(folder), logprobs_mode=mode)
    options: dict[str, Any] = {"temperature": 0.6, "top_p": 0.8, "frequency_penalty": 1.0, "seed": 2, "max_tokens": 10}
    params = [SamplingParams(**options, logprobs=count) for count in (None, 0, 5)]
    totals = []
    for output in generate(engine, prompts(8) * 3, params):
        completion = output.outputs[0]
        expected = logits_after_each(reference, [*output.prompt_token_ids, *completion.token_ids]).log_softmax(-1)[7:]
        total = sum(float(expected[place, token_id]) for place, token_id in enumerate(completion.token_ids))
        totals.append(completion.cumulative_logprob)
        assert completion.cumulative_logprob == pytest.approx(total, abs=10 * CLOSE)
    assert totals == pytest.approx([totals[0]] * 3, abs=1e-5)


def test_banned_tokens_are_not_among_the_likeliest(folder: Path) -> None:
    engine = LLM(str(folder), logprobs_mode="processed")
    completion = generate(engine, prompts(8), seed=2, max_tokens=6, allowed_token_ids=[3, 4], logprobs=9)[0].outputs[0]
    assert completion.logprobs is not None
    for row in completion.logprobs:
        assert set(row) == {3, 4}
        assert sum(math.exp(entry.logprob) for entry in row.values()) == pytest.approx(1, abs=1e-5)


# -- every schedule, on a model with exact logits -----------------------------------------------------------------


@st.composite
def reporting_requests(draw: st.DrawFn) -> Asked:
    prompt = draw(st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8], [9]])) + draw(st.lists(st.integers(1, 2), max_size=9))
    kind = draw(st.sampled_from(["samples", "samples", "beams", "diverse", "scored"]))
    options: dict[str, Any] = {"n": draw(st.integers(1, 3)), "max_tokens": draw(st.integers(1, 8))}
    if kind in ("samples", "diverse"):
        options["seed"] = draw(st.integers(0, 3))
    if kind == "beams":
        options |= {"strategy": "beam_search", "beam_width": 3}
    if kind == "diverse":
        options |= {"strategy": "diverse", "diversity_penalty": 1.5}
    prompt_logprobs = draw(st.sampled_from([None, 0, 3]))
    if kind == "scored":
        options, prompt_logprobs = {"max_tokens": 0}, prompt_logprobs or 0
    return prompt, SamplingParams(
        **options, logprobs=draw(st.sampled_from([None, 0, 3])), prompt_logprobs=prompt_logprobs
    )


def reports_of(output: RequestOutput) -> tuple[Any, ...]:
    return output.prompt_logprobs, [
        (completion.token_ids, completion.logprobs, completion.cumulative_logprob) for completion in output.outputs
    ]


@given(
    asked=st.lists(reporting_requests(), min_size=1, max_size=5),
    budget=st.sampled_from([3, 5, 64]),  # beams step together: one token for each of three
    spare=st.sampled_from([0, 2, 40]),
    swaps=st.booleans(),
    caches=st.booleans(),
)
@settings(max_examples=40)
def test_every_schedule_reports_what_a_request_would_get_alone(
    asked: list[Asked], budget: int, spare: int, swaps: bool, caches: bool
) -> None:
    needed = max(len(prompt) // 4 + 3 * -(-((params.max_tokens or 0) + 4) // 4) for prompt, params in asked)
    engine = fake_engine(
        num_blocks=needed + spare,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        preemption_mode="swap" if swaps else "recompute",
        num_host_blocks=20 if swaps else 0,
        enable_prefix_caching=caches,
    )
    for output, each in zip(finish(engine, asked), asked, strict=True):
        alone = finish(fake_engine(num_blocks=512, max_num_batched_tokens=512), [each])[0]
        assert reports_of(output) == reports_of(alone)
        if each[1].prompt_logprobs is not None:
            assert output.num_cached_tokens == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_prompt_preempted_on_its_way_is_reported_once_and_whole(mode: Any) -> None:
    """The second prompt comes in chunks of two while the first request takes block after block from it.

    What is computed again comes in chunks of five, so one of them begins in what was told and ends beyond it.
    """
    asked: list[Asked] = [
        ([5, 6], SamplingParams(n=3, max_tokens=14, ignore_eos=True, seed=1)),
        (list(range(1, 25)), SamplingParams(max_tokens=3, ignore_eos=True, seed=2, prompt_logprobs=2)),
    ]
    engine = fake_engine(
        num_blocks=8, max_num_batched_tokens=5, preemption_mode=mode, num_host_blocks=20, enable_prefix_caching=False
    )
    before_the_end = 0
    for number, (prompt, params) in enumerate(asked):
        engine.add_request(Request(str(number), None, prompt, params))
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        group = engine.requests.groups.get("1")
        told = 0 if group is None else len(group.prompt_reports)
        preempted = engine.stats()["preemptions"]
        outputs |= {output.request_id: output for output in engine.step()}
        before_the_end += 0 < told < 23 and engine.stats()["preemptions"] > preempted
    assert before_the_end, "it was preempted while its prompt was on its way"
    alone = finish(fake_engine(num_blocks=512), asked[1:])[0]
    assert reports_of(outputs["1"]) == reports_of(alone)


def test_streamed_logprobs_add_up_to_the_whole() -> None:
    options: dict[str, Any] = {"n": 2, "max_tokens": 6, "seed": 4, "ignore_eos": True, "logprobs": 2}
    whole = finish(fake_engine(), [([1, 2, 3], SamplingParams(**options))])[0]
    engine = fake_engine()
    engine.add_request(Request("r", None, [1, 2, 3], SamplingParams(**options, output_kind="delta")))
    pieces: dict[int, list[LogprobRow]] = {0: [], 1: []}
    while engine.has_unfinished():
        for output in engine.step():
            for completion in output.outputs:
                assert completion.logprobs is not None
                assert len(completion.logprobs) == len(completion.token_ids) == 1
                pieces[completion.index] += completion.logprobs
    assert [pieces[completion.index] for completion in whole.outputs] == [
        completion.logprobs for completion in whole.outputs
    ]


# -- the sequence of rows -----------------------------------------------------------------------------------------


def rows_of(*token_ids: int) -> LogprobRows:
    reports = [
        TokenReport(
            -float(token_id),
            3,
            torch.tensor([90, 91]).numpy(),
            torch.tensor([-0.25, NEVER], dtype=torch.float32).numpy(),
        )
        for token_id in token_ids
    ]
    return LogprobRows(token_ids, reports, lambda token_id: f"<{token_id}>")


def test_rows_behave_like_a_sequence() -> None:
    rows = rows_of(5, 6, 7, 8)
    listed = list(rows)
    assert len(rows) == len(listed) == 4
    assert [rows[index] for index in range(4)] == listed
    assert [rows[index] for index in range(-4, 0)] == listed
    assert list(rows[1:3]) == listed[1:3]
    assert rows[::-1] == listed[::-1]
    assert rows[:0] == []
    assert list(reversed(rows)) == listed[::-1]
    assert listed[2] in rows
    assert rows.index(listed[2]) == 2
    for index in (4, -5):
        with pytest.raises(IndexError):
            rows[index]
    assert rows[0] is not rows[0], "each row is made when it is read"
    with pytest.raises(TypeError):
        rows[0] = {}  # type: ignore[index]


def test_rows_are_equal_when_what_they_say_is_equal() -> None:
    assert rows_of(5, 6) == rows_of(5, 6)
    assert hash(rows_of(5, 6)) == hash(rows_of(5, 6))
    assert rows_of(5, 6) == list(rows_of(5, 6))
    assert rows_of(5, 6) != rows_of(5, 7)
    assert rows_of(5, 6) != rows_of(5)
    assert rows_of() == []
    assert rows_of(5) != "5"
    assert rows_of(5) != 5


def test_rows_are_copied_and_sent_without_the_tokenizer_that_names_their_tokens(llm: LLM) -> None:
    """It went along with every output: 1.5 MB for five tokens of the default model."""
    rows = rows_of(5, 6)
    for same in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows)):
        assert same == rows
        assert same[1][6].decoded_token == "<6>"
        assert same[:1] == rows[:1]
    [output] = llm.generate([3, 4], SamplingParams(max_tokens=4, seed=1, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    sent = pickle.dumps(output)
    assert len(sent) < 4096
    assert pickle.loads(sent) == output


def test_a_row_names_its_tokens_and_leaves_out_the_impossible() -> None:
    row = rows_of(5)[0]
    assert {token_id: (entry.logprob, entry.rank, entry.decoded_token) for token_id, entry in row.items()} == {
        90: (-0.25, 1, "<90>"),
        5: (-5.0, 3, "<5>"),
    }


# -- the default model --------------------------------------------------------------------------------------------


def test_the_default_models_logprobs_equal_transformers(default_gguf: Path) -> None:
    default = LLM(str(default_gguf))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    ).eval()
    assert default.tokenizer is not None
    asked = ["The capital of France is", "def fibonacci(n):\n    ", "日本の首都は"]
    outputs = generate(default, asked, n=2, seed=3, temperature=0.8, max_tokens=8, logprobs=5, prompt_logprobs=3)
    for output in outputs:
        check_prompt(output, reference, 3)
        for completion in output.outputs:
            check_completion(completion, output.prompt_token_ids, reference, 5)
            assert completion.logprobs is not None
            for token_id, entry in completion.logprobs[0].items():
                assert entry.decoded_token == default.tokenizer.decode([token_id], skip_special_tokens=False)
