"""AsyncLLM with the default model: the outputs of LLM, as streams."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ramify import (
    LLM,
    AsyncEngine,
    AsyncLLM,
    ChatTemplateError,
    EngineClosedError,
    InvalidInputError,
    SamplingParams,
    UnsupportedError,
)
from ramify.remote.remote_engine import RemoteEngine
from tests.serving import ENGINE_PROCESS

PROMPTS = ["Once upon a time", "The capital of France is", "One, two, three,"]
MESSAGES = [{"role": "user", "content": "Name a colour."}]
PARAMS: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 8}
OPTIONS: dict[str, Any] = {"num_kv_blocks": 256, "generation_config": "none"}

pytestmark = pytest.mark.usefixtures("default_gguf")


def run(body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncLLM(**OPTIONS, engine_process=ENGINE_PROCESS) as llm:
            await body(llm)

    asyncio.run(main())


def test_streams_of_each_kind_end_with_what_generate_returns() -> None:
    sync = LLM(**OPTIONS)
    wanted = sync.generate(PROMPTS, SamplingParams(**PARAMS), use_tqdm=False)
    chat = sync.chat(MESSAGES, SamplingParams(**PARAMS), use_tqdm=False)[0]

    async def body(llm: AsyncLLM) -> None:
        for kind in ("final_only", "cumulative", "delta"):
            params = SamplingParams(**PARAMS, output_kind=kind)
            finals = await asyncio.gather(*(llm.generate(prompt, params).final() for prompt in PROMPTS))
            for final, output in zip(finals, wanted, strict=True):
                assert [completion.text for completion in final.outputs] == [
                    completion.text for completion in output.outputs
                ]
                assert [completion.token_ids for completion in final.outputs] == [
                    completion.token_ids for completion in output.outputs
                ]
        answer = await llm.chat(MESSAGES, SamplingParams(**PARAMS)).final()
        assert [completion.text for completion in answer.outputs] == [completion.text for completion in chat.outputs]
        steps = [output async for output in llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, output_kind="delta"))]
        assert len(steps) > 2
        assert [output.finished for output in steps] == [False] * (len(steps) - 1) + [True]
        assert llm.stats()["blocks_in_use"] == 0

    run(body)


def test_a_bad_request_raises_at_once_and_leaves_nothing() -> None:
    async def body(llm: AsyncLLM) -> None:
        for prompt, params in (
            ("", SamplingParams()),
            ([10**6], SamplingParams()),
            ("x", SamplingParams(max_tokens=100_000)),
            ("x", SamplingParams(logprobs=21)),
        ):
            with pytest.raises(InvalidInputError):
                llm.generate(prompt, params)
        with pytest.raises((InvalidInputError, ChatTemplateError)):
            llm.chat([])
        with pytest.raises(UnsupportedError, match="lora_request must be None"):
            llm.generate("x", lora_request="adapter")  # type: ignore[call-arg]
        assert llm.engine.num_unfinished == 0
        assert llm.stats()["steps"] == 0

    run(body)


def test_names_are_the_callers_or_made_up() -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=2)
        named = await llm.generate("x", params, "mine").final()
        made = [(await llm.generate("x", params).final()).request_id for _ in range(2)]
        assert named.request_id == "mine"
        assert len(set(made)) == 2

    run(body)


def test_after_shutdown_requests_are_refused() -> None:
    async def main() -> None:
        llm = AsyncLLM(**OPTIONS, engine_process=ENGINE_PROCESS)
        await llm.shutdown()
        with pytest.raises(EngineClosedError):
            llm.generate("x")

    asyncio.run(main())


def test_an_engine_that_is_lost_ends_its_thread() -> None:
    llm = AsyncLLM(**OPTIONS, engine_process=ENGINE_PROCESS)
    assert isinstance(llm.engine, AsyncEngine | RemoteEngine)
    thread = llm.engine._link._reader if isinstance(llm.engine, RemoteEngine) else llm.engine._thread
    del llm
    gc.collect()
    thread.join(timeout=30)
    assert thread not in threading.enumerate()


def test_a_program_that_forgets_to_shut_down_ends_all_the_same() -> None:
    program = """
import asyncio
from ramify import AsyncEngine, AsyncLLM, SamplingParams
llm = AsyncLLM(num_kv_blocks=256)
async def main():
    stream = llm.generate("x", SamplingParams(max_tokens=2000, ignore_eos=True, output_kind="delta"))
    await anext(stream)
    print("begun")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert [done.returncode, done.stdout, done.stderr] == [0, "begun\n", ""]


WRITTEN = 'Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def writes(llm: AsyncLLM, prompt: str) -> Any:
    """A processor that makes the model write that after a prompt."""
    assert llm.tokenizer is not None
    num_before = len(llm.tokenizer.encode(prompt, add_special_tokens=False))
    wanted = [*llm.tokenizer.encode(WRITTEN, add_special_tokens=False), min(llm.tokenizer.eos_token_ids)]

    def process(token_ids: list[int], logits: Any) -> Any:
        kept = wanted[len(token_ids) - num_before]
        value = logits[kept].clone()
        logits.fill_(float("-inf"))
        logits[kept] = value
        return logits

    return process


def test_a_sample_that_has_ended_has_its_tool_calls() -> None:
    if ENGINE_PROCESS:
        pytest.skip("callers' processors need the engine in this process")

    async def body(llm: AsyncLLM) -> None:
        template = "{{ tools | length }}<tool_call>{{ messages[0].content }}"
        chat: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template": template}
        written = writes(llm, f"1<tool_call>{MESSAGES[0]['content']}")
        for kind in ("delta", "cumulative", "final_only"):
            params = SamplingParams(n=2, max_tokens=64, temperature=1, logits_processors=[written], output_kind=kind)
            outputs = [output async for output in llm.chat(MESSAGES, params, **chat)]
            calls = [sample.tool_calls for output in outputs for sample in output.outputs if sample.finish_reason]
            assert {(call.name, call.arguments) for each in calls for call in each or ()} == {("f", '{"a": 1}')}
            final = await llm.chat(MESSAGES, params, **chat).final()
            assert [sample.text for sample in final.outputs] == [WRITTEN] * 2
            assert [len(sample.tool_calls or ()) for sample in final.outputs] == [1, 1]
        none = await llm.chat(MESSAGES, SamplingParams(max_tokens=2)).final()
        assert none.outputs[0].tool_calls is None
        with pytest.raises(ChatTemplateError, match="tools are not supported by this model"):
            llm.chat(MESSAGES, tools=chat["tools"])
        with pytest.raises(InvalidInputError, match="tool_choice must be 'none', 'auto'"):
            llm.chat(MESSAGES, tools=chat["tools"], tool_choice="perhaps")

    run(body)
