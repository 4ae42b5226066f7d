"""LLM with real models: prompts in every form, samples, seeds, ends, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, FinishReason, InvalidInputError, ModelConfig, SamplingParams
from ramify.models.loader import ModelLoader
from ramify.outputs import RequestOutput
from tests.conftest import CheckpointMaker, rewrite_config


@pytest.fixture(scope="module")
def llm(default_gguf: Path) -> LLM:
    return LLM(str(default_gguf))


@pytest.fixture(scope="module")
def tiny(make_checkpoint: CheckpointMaker) -> LLM:
    """A folder without a tokenizer: token ids in, empty text out."""
    return LLM(str(make_checkpoint("llama")))


def _generate(llm: LLM, prompts: Any, **params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def _tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


# -- prompts ---------------------------------------------------------------------------------------------------


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    text = "The sky is"
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    alone = [_generate(llm, form, temperature=0, max_tokens=4) for form in forms]
    together = _generate(llm, forms, temperature=0, max_tokens=4)
    assert len({_tokens(outputs[0])[0] for outputs in [*alone, together]}) == 1
    assert [len(outputs) for outputs in alone] == [1, 1, 1, 1]
    assert together[0].prompt == text
    assert together[1].prompt is None
    assert together[1].prompt_token_ids == tuple(ids)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_outputs_keep_the_order_of_prompts_and_params(tiny: LLM) -> None:
    prompts = [[index, index + 1] for index in range(20)]
    params = [SamplingParams(max_tokens=1 + index % 7, seed=index) for index in range(20)]
    outputs = tiny.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert [len(_tokens(output)[0]) for output in outputs] == [1 + index % 7 for index in range(20)]


def test_a_text_beside_token_ids_is_told_again(tiny: LLM) -> None:
    """As vLLM's users have it, who tokenize by themselves; the model has no tokenizer that could read the text."""
    params = SamplingParams(max_tokens=2, seed=1)
    prompts: list[Any] = [
        [1, 2],
        {"prompt_token_ids": [1, 2], "prompt": "one two"},
        {"prompt_token_ids": [1, 2], "prompt": None},
    ]
    alone, told, untold = tiny.generate(prompts, params, use_tqdm=False)
    assert (alone.prompt, told.prompt, untold.prompt) == (None, "one two", None)
    assert told.prompt_token_ids == (1, 2)
    assert told.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt must not be empty"),
        ([[]], "prompt must not be empty"),
        ([[1, 320]], r"prompt_token_ids\[1\] must be an integer in 0..319, got 320"),
        ([[1, -1]], r"prompt_token_ids\[1\] must be"),
        ([[1, True]], r"prompt_token_ids\[1\] must be"),
        ([[1.5]], r"prompt_token_ids\[0\] must be"),
        ({"prompt": "a", "extra": 1}, "the key prompt, the key prompt_token_ids or both"),
        ({}, "the key prompt, the key prompt_token_ids or both"),
        ({"prompt_token_ids": [1], "prompt": [2]}, "prompt must be the text of prompt_token_ids"),
        (7, "prompts must be text, token ids, or a list"),
        (b"text", "prompts must be text, token ids, or a list"),  # not the ids 116, 101, 120, 116
        ({"b", "a"}, "prompts must be text, token ids, or a list"),
        ([{2, 1}], "prompt_token_ids must be a list: a set has no order"),
        ([None], "prompt_token_ids must be a list"),
        ("text", "no tokenizer"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(tiny: LLM, prompts: Any, message: str) -> None:
    before = tiny.stats()
    bad = [*prompts, [1, 2]] if isinstance(prompts, list) else prompts
    if prompts == "":
        message = "no tokenizer"
    with pytest.raises(InvalidInputError, match=message):
        tiny.generate(bad, use_tqdm=False)
    assert tiny.stats() == before


def test_an_empty_text_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="must not be empty"):
        llm.generate("", use_tqdm=False)


def test_a_bad_parameter_of_any_prompt_raises_before_the_first_starts(tiny: LLM) -> None:
    before = tiny.stats()
    params = [SamplingParams(), SamplingParams(max_tokens=511)]
    with pytest.raises(InvalidInputError, match="prompt of 2 tokens plus max_tokens 511 must fit max_model_len = 512"):
        tiny.generate([[1], [1, 2]], params, use_tqdm=False)
    with pytest.raises(InvalidInputError, match="one per prompt: got 2 for 1 prompts"):
        tiny.generate([[1]], params, use_tqdm=False)
    with pytest.raises(InvalidInputError, match=r"stop_token_ids\[0\] must be an integer in 0..319"):
        tiny.generate([[1]], SamplingParams(stop_token_ids=[320]), use_tqdm=False)
    with pytest.raises(InvalidInputError, match=r"logprobs must be an integer in 0..20|logprobs is not supported"):
        tiny.generate([[1]], SamplingParams(logprobs=21), use_tqdm=False)
    assert tiny.stats() == before


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="'blocksize' is not an engine option"):
        LLM("anything", blocksize=3)  # type: ignore[call-arg]


# -- samples and seeds -----------------------------------------------------------------------------------------


def test_samples_of_one_prompt_differ_and_come_in_order(llm: LLM) -> None:
    output = _generate(llm, "Once upon a time", n=4, temperature=0.8, seed=7, max_tokens=24)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len(set(_tokens(output))) == 4
    assert all(completion.text and completion.cumulative_logprob < 0 for completion in output.outputs)


def test_the_prompt_is_computed_once_for_all_samples(tiny: LLM) -> None:
    before = tiny.stats()["prompt_tokens_computed"]
    _generate(tiny, [list(range(100))], n=16, max_tokens=5)
    assert tiny.stats()["prompt_tokens_computed"] - before == 100
    assert tiny.stats()["blocks_in_use"] == 0


def test_child_i_is_the_same_whatever_n_is(tiny: LLM) -> None:
    prompt = [[5, 6, 7]]
    many = _tokens(_generate(tiny, prompt, n=64, seed=3, max_tokens=12)[0])
    few = _tokens(_generate(tiny, prompt, n=4, seed=3, max_tokens=12)[0])
    one = _tokens(_generate(tiny, prompt, n=1, seed=3, max_tokens=12)[0])
    assert many[:4] == few
    assert few[:1] == one


def test_requests_without_a_seed_differ_but_whole_runs_repeat(make_checkpoint: CheckpointMaker) -> None:
    folder = str(make_checkpoint("llama"))
    runs = [
        [_tokens(output) for output in _generate(LLM(folder, seed=seed), [[1, 2, 3]] * 2, max_tokens=16)]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_more_samples_than_sequences_that_may_run_go_in_waves(make_checkpoint: CheckpointMaker) -> None:
    folder = str(make_checkpoint("qwen2"))
    wide, narrow = LLM(folder), LLM(folder, max_num_seqs=3, max_num_batched_tokens=8, block_size=4, num_kv_blocks=20)
    prompt = [list(range(30))]
    expected = _tokens(_generate(wide, prompt, n=10, seed=1, max_tokens=9)[0])
    assert _tokens(_generate(narrow, prompt, n=10, seed=1, max_tokens=9)[0]) == expected
    stats = narrow.stats()
    assert stats["prompt_tokens_computed"] == 30
    assert stats["blocks_in_use"] == 0
    assert stats["blocks_in_use_peak"] <= 20


def test_best_of_returns_the_best_with_their_scores(tiny: LLM) -> None:
    everyone = _generate(tiny, [[9, 8]], n=6, seed=4, max_tokens=10)[0].outputs
    best = _generate(tiny, [[9, 8]], n=2, best_of=6, seed=4, max_tokens=10)[0].outputs
    by_logprob = sorted(everyone, key=lambda completion: -completion.cumulative_logprob)
    assert [completion.token_ids for completion in best] == [completion.token_ids for completion in by_logprob[:2]]
    assert [completion.index for completion in best] == [0, 1]
    assert [completion.score for completion in best] == [completion.cumulative_logprob for completion in best]
    shortest = _generate(
        tiny, [[9, 8]], n=1, best_of=6, seed=4, max_tokens=10, score=lambda completion: -sum(completion.token_ids)
    )
    assert shortest[0].outputs[0].token_ids == min(everyone, key=lambda completion: sum(completion.token_ids)).token_ids


def test_a_score_function_that_raises_ends_its_request_alone(tiny: LLM) -> None:
    params = [SamplingParams(n=1, best_of=2, max_tokens=3, score=lambda _: 1 / 0), SamplingParams(max_tokens=3)]
    bad, good = tiny.generate([[1], [2]], params, use_tqdm=False)
    assert bad.error is not None
    assert "ZeroDivisionError" in bad.error
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 3


# -- ends ------------------------------------------------------------------------------------------------------


def test_eos_ends_and_is_counted_but_not_shown(llm: LLM) -> None:
    output = llm.chat(
        [{"role": "user", "content": "Say hi"}], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False
    )[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.token_ids[-1] == 2  # <|im_end|>
    assert "<|im_end|>" not in output.text


def test_stop_strings_cut_across_token_borders(llm: LLM) -> None:
    plain = _generate(llm, "Count: 1, 2, 3,", temperature=0, max_tokens=24)[0].outputs[0]
    stop = plain.text[7:12]
    assert plain.text.find(stop) >= 0
    cut = _generate(llm, "Count: 1, 2, 3,", temperature=0, max_tokens=24, stop=["never there", stop])[0].outputs[0]
    assert cut.text == plain.text[: plain.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    kept = _generate(llm, "Count: 1, 2, 3,", temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)[
        0
    ].outputs[0]
    assert kept.text == cut.text + stop


def test_stop_ids_and_min_tokens(tiny: LLM) -> None:
    free = _tokens(_generate(tiny, [[3]], temperature=0, max_tokens=20)[0])[0]
    stop = free[4]
    first = free.index(stop)
    ended = _generate(tiny, [[3]], temperature=0, max_tokens=20, stop_token_ids=[stop])[0].outputs[0]
    assert ended.token_ids == free[: first + 1]
    assert ended.stop_reason == stop
    later = _generate(tiny, [[3]], temperature=0, max_tokens=20, stop_token_ids=[stop], min_tokens=10)[0].outputs[0]
    assert stop not in later.token_ids[:10]
    assert len(later.token_ids) >= 10


def test_no_max_tokens_means_the_whole_context(tiny: LLM) -> None:
    output = _generate(tiny, [[1] * 500], max_tokens=None)[0].outputs[0]
    assert len(output.token_ids) == 12
    assert output.finish_reason == "length"


def test_all_eos_ids_of_config_and_generation_config_end(make_checkpoint: CheckpointMaker) -> None:
    folder = make_checkpoint("llama")
    free = _tokens(_generate(LLM(str(folder)), [[7]], temperature=0, max_tokens=30)[0])[0]
    seen: list[int] = list(dict.fromkeys(free))
    rewrite_config(folder, eos_token_id=seen[4])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [seen[2], 319]}))
    llm = LLM(str(folder))
    assert _tokens(_generate(llm, [[7]], temperature=0, max_tokens=30)[0])[0] == free[: free.index(seen[2]) + 1]
    (folder / "generation_config.json").unlink()
    assert (
        _tokens(_generate(LLM(str(folder)), [[7]], temperature=0, max_tokens=30)[0])[0]
        == (free[: free.index(seen[4]) + 1])
    )
    assert _tokens(_generate(llm, [[7]], temperature=0, max_tokens=30, ignore_eos=True)[0])[0] == free


# -- what is not there -----------------------------------------------------------------------------------------


def test_bad_words_may_have_tokens_that_were_never_given_an_embedding(
    make_checkpoint: CheckpointMaker, default_gguf: Path
) -> None:
    """Such a token is never written, and banning it broke the step, for every request."""
    tokenizer = ModelLoader(ModelConfig(model=str(default_gguf))).load_tokenizer()
    assert tokenizer is not None
    folder = make_checkpoint("llama", vocab_size=49_100, num_hidden_layers=1)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    words = tokenizer.decode([49_140]), " the"
    small = LLM(str(folder), max_model_len=64, num_kv_blocks=32)
    wanted = SamplingParams(max_tokens=4, seed=1, bad_words=words, dry_multiplier=1.0, dry_sequence_breakers=words)
    [beside, output] = small.generate(
        ["One day", "One day"], [SamplingParams(max_tokens=4, seed=1), wanted], use_tqdm=False
    )
    assert beside.error is output.error is None
    assert len(output.outputs[0].token_ids) == 4


def test_bad_words_need_a_tokenizer(tiny: LLM) -> None:
    with pytest.raises(InvalidInputError, match="bad_words"):
        _generate(tiny, [[1]], bad_words=["no"])


def test_a_model_without_a_chat_template_says_so(tiny: LLM) -> None:
    with pytest.raises(InvalidInputError, match="no chat template"):
        tiny.chat([{"role": "user", "content": "hi"}])


def test_an_interrupted_call_leaves_the_engine_usable(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    launch = tiny.core.device.launch

    def interrupted(plan: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return launch(plan)

    monkeypatch.setattr(tiny.core.device, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _generate(tiny, [[1, 2], [3]], n=3, max_tokens=20)
    assert tiny.stats()["blocks_in_use"] == 0
    assert not tiny.core.has_unfinished()
    assert len(_generate(tiny, [[1, 2]], max_tokens=5)[0].outputs[0].token_ids) == 5


# -- the engine, on a real model -------------------------------------------------------------------------------


def test_sixty_four_samples_of_a_long_prompt_cost_one_prompt_and_their_own_blocks(
    make_checkpoint: CheckpointMaker,
) -> None:
    llm = LLM(str(make_checkpoint("llama", max_position_embeddings=2048)))
    prompt = [[index % 300 for index in range(1024)]]
    output = _generate(llm, prompt, n=64, max_tokens=40, seed=1)[0]
    stats = llm.stats()
    assert len(set(_tokens(output))) == 64
    assert stats["prompt_tokens_computed"] == 1024
    # 39 of 40 tokens are ever written: three blocks a sample, beside the prompt's 64.
    assert stats["blocks_in_use_peak"] == 64 + 64 * 3
    assert stats["blocks_in_use"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 14, "block_size": 8},
        {"num_kv_blocks": 14, "block_size": 8, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_kv_blocks": 14, "block_size": 8, "enable_prefix_caching": False, "max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 3},
        {"block_size": 1},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
def test_no_engine_option_changes_what_is_drawn(make_checkpoint: CheckpointMaker, options: Any) -> None:
    folder = str(make_checkpoint("qwen3"))
    prompts = [list(range(40)), list(range(30)), [7] * 20]
    params: dict[str, Any] = {"n": 3, "seed": 9, "max_tokens": 30, "temperature": 0.8, "top_p": 0.9}
    expected = [_tokens(output) for output in _generate(LLM(folder), prompts, **params)]
    llm = LLM(folder, **options)
    assert [_tokens(output) for output in _generate(llm, prompts, **params)] == expected
    if "num_kv_blocks" in options:
        assert llm.stats()["preemptions"] > 0
    assert llm.stats()["blocks_in_use"] == 0


def test_a_prompt_seen_before_is_not_computed_again(tiny: LLM) -> None:
    tiny.reset_prefix_cache()
    prompt = [list(range(100))]
    first = _generate(tiny, prompt, temperature=0, max_tokens=8)[0]
    before = tiny.stats()
    second = _generate(tiny, prompt, temperature=0, max_tokens=8)[0]
    assert _tokens(first) == _tokens(second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert tiny.stats()["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 4
    assert tiny.stats()["prompt_tokens_cached"] - before["prompt_tokens_cached"] == 96


def test_priorities_are_one_or_one_per_prompt(tiny: LLM) -> None:
    outputs = tiny.generate([[1], [2]], SamplingParams(max_tokens=2), use_tqdm=False, priority=[1, 0])
    assert [output.prompt_token_ids for output in outputs] == [(1,), (2,)]
    with pytest.raises(InvalidInputError, match="priority must be one, or one per prompt"):
        tiny.generate([[1], [2]], use_tqdm=False, priority=[1])
    with pytest.raises(InvalidInputError, match="priority must be an integer"):
        tiny.generate([[1]], use_tqdm=False, priority=["high"])  # type: ignore[list-item]


def test_beam_search_is_the_strategy_by_a_shorter_name(tiny: LLM) -> None:
    named = tiny.beam_search([[1, 2, 3]], beam_width=3, n=2, max_tokens=5, use_tqdm=False)[0]
    plain = _generate(tiny, [[1, 2, 3]], strategy="beam_search", beam_width=3, n=2, max_tokens=5)[0]
    assert _tokens(named) == _tokens(plain)
    assert [completion.score for completion in named.outputs] == [completion.score for completion in plain.outputs]
