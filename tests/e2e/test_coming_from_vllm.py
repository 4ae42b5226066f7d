"""Scripts written for vLLM, with Ramify in its place."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import LLM, InvalidInputError, SamplingParams, TokensPrompt, UnsupportedAttributeError, UnsupportedError
from ramify.text.hugging_face_tokenizer import HuggingFaceTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_vllm.md"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """What the page's script leaves behind, with the import that it had for vLLM: it finds Ramify."""
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    imported, was = "from ramify import LLM, SamplingParams", "from vllm import LLM, SamplingParams"
    assert source.startswith(f"{imported}  # was: {was}\n")
    source = source.replace(imported, was, 1)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setitem(sys.modules, "vllm", ramify)
        exec(compile(source, str(PAGE), "exec"), names)
    return {**names, "printed": printed.getvalue()}


@pytest.fixture(scope="module")
def llm(script: dict[str, Any]) -> LLM:
    made = script["llm"]
    assert isinstance(made, LLM)
    return made


def test_the_pages_script_runs_unchanged(script: dict[str, Any]) -> None:
    lines = script["printed"].splitlines()
    assert lines[-1] == "0.2", "the embedded model's recommendation"
    assert lines[-2] == "The capital of France is Paris."
    assert [len(output.outputs) for output in script["outputs"]] == [2, 2]
    assert script["outputs"][1].prompt_token_ids == tuple(script["tokenizer"].encode("Trees are"))


def test_chat_without_parameters_draws_as_the_model_recommends(llm: LLM) -> None:
    [silent] = llm.chat(MESSAGES, use_tqdm=False)
    assert silent.outputs[0].text == "The capital of France is Paris."
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2, top_p=0.9)


def test_chat_goes_on_with_the_last_message(llm: LLM) -> None:
    open_turn = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    [output] = llm.chat(open_turn, greedy, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\nThe capital of France is")
    assert output.outputs[0].text == " Paris."
    with pytest.raises(InvalidInputError, match="continue_final_message needs add_generation_prompt to be False"):
        llm.chat(open_turn, greedy, continue_final_message=True)


def test_chat_takes_a_template_and_what_it_reads(llm: LLM) -> None:
    template = "{{ tools[0].name }}: {{ messages[0].content }}"
    greedy = SamplingParams(temperature=0, max_tokens=1)
    [output] = llm.chat(MESSAGES, greedy, chat_template=template, tools=[{"name": "map"}], use_tqdm=False)
    assert output.prompt == "map: What is the capital of France?"
    assert output.outputs[0].tool_calls is None, "a template that shows no format"
    [output] = llm.chat(MESSAGES, greedy, chat_template=template + "<tool_call>", tools=[{"name": "f"}], use_tqdm=False)
    assert output.outputs[0].tool_calls == ()


def test_prompts_as_vllm_has_them(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=2)
    ids = llm.get_tokenizer().encode("The capital of France is")
    prompts: list[Any] = [TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids, "multi_modal_data": None}]
    outputs = llm.generate(prompts, sampling_params=[greedy, greedy], use_tqdm=False, priority=None)
    assert [output.outputs[0].text for output in outputs] == [" Paris."] * 2


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda llm: llm.llm_engine, UnsupportedAttributeError, "LLM has no llm_engine: llm.core"),
        (lambda llm: llm.embed(["a"]), UnsupportedAttributeError, "LLM has no embed"),
        (lambda llm: llm.nothing, AttributeError, "no attribute 'nothing'"),
        (lambda llm: llm.generate("a", lora_request="x"), UnsupportedError, "lora_request must be None"),
        (lambda llm: llm.generate("a", sampling_parms=1), InvalidInputError, "did you mean sampling_params?"),
        (lambda llm: llm.generate("a", use_tqdm=print), InvalidInputError, "use_tqdm must be True or False"),
        (lambda llm: llm.chat(MESSAGES, mm_processor_kwargs={"a": 1}), UnsupportedError, "mm_processor_kwargs"),
        (lambda llm: llm.beam_search("a", object()), InvalidInputError, "takes its options by name"),
        (lambda llm: llm.beam_search("a", lenght_penalty=1), InvalidInputError, "did you mean length_penalty?"),
        (lambda llm: llm.get_tokenizer().padding_side, UnsupportedAttributeError, "has no 'padding_side'"),
        (lambda llm: setattr(llm.get_tokenizer(), "pad_token", "x"), UnsupportedAttributeError, "cannot be changed"),
        (lambda llm: llm.generate("a", {"n": 2}), InvalidInputError, "sampling_params must be one SamplingParams, or"),
        (lambda llm: llm.chat(MESSAGES[0]), InvalidInputError, "a list of messages, or a list of such lists, not dict"),
        (lambda llm: llm.chat("Hello"), InvalidInputError, "a list of messages, or a list of such lists, not str"),
        (lambda llm: llm.chat(None), InvalidInputError, "a list of such lists, not NoneType"),
        (lambda llm: llm.chat(iter(MESSAGES)), InvalidInputError, "a list of such lists, not list_iterator"),
        (
            lambda llm: llm.get_tokenizer().apply_chat_template(MESSAGES[0]),
            InvalidInputError,
            "a list of such lists, not dict",
        ),
        (lambda llm: llm.get_tokenizer().apply_chat_template([]), InvalidInputError, "messages must not be empty"),
    ],
)
def test_what_is_not_there_is_refused_by_name(llm: LLM, call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call(llm)
    assert not hasattr(llm, "collective_rpc"), "callers may ask"


def test_beam_search_takes_other_options_and_neutral_ones(llm: LLM) -> None:
    [output] = llm.beam_search(
        "Trees are", beam_width=2, max_tokens=3, length_penalty=0.5, use_tqdm=False, lora_request=None
    )
    assert len(output.outputs) == 2


def test_a_model_without_a_tokenizer_says_so() -> None:
    from ramify.text.codec import TextCodec

    with pytest.raises(InvalidInputError, match="no tokenizer"):
        HuggingFaceTokenizer(TextCodec(None))
