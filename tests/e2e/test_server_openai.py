"""The official openai client against a real server with the default model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ramify import LLM, AsyncLLM, SamplingParams
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from tests.serving import ENGINE_PROCESS, serving

MODEL = "smollm2-135m"
PROMPT = "The best thing about trees is"
CHAT: list[Any] = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_kv_blocks=512)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = AsyncLLM(num_kv_blocks=512, generation_config="none", engine_process=ENGINE_PROCESS)
    app = create_app(llm, ServerConfig(api_key="sesame"))
    with serving(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)


def texts(llm: LLM, prompt: str, **params: Any) -> list[str]:
    [output] = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return [completion.text for completion in output.outputs]


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == 8192
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, llm: LLM) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, n=4, seed=7, temperature=0.8, max_tokens=12)
    assert [choice.text for choice in reply.choices] == texts(llm, PROMPT, n=4, seed=7, temperature=0.8, max_tokens=12)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in reply.choices} <= {"stop", "length"}
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(llm.tokenizer.encode(PROMPT))  # type: ignore[union-attr]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streaming_n_4_adds_up_to_the_plain_reply(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "n": 4, "seed": 7, "max_tokens": 12}
    plain = client.completions.create(**asked)
    streamed: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    usages = []
    num_events = 0
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        num_events += 1
        usages.append(chunk.usage)
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            if choice.finish_reason:
                assert choice.index not in ends, "an end is told once"
                ends[choice.index] = choice.finish_reason
    assert [streamed[index] for index in range(4)] == [choice.text for choice in plain.choices]
    assert [ends[index] for index in range(4)] == [choice.finish_reason for choice in plain.choices]
    assert num_events > 12, "tokens come one by one, not all at the end"
    assert usages[:-1] == [None] * (num_events - 1)
    assert usages[-1] is not None
    assert plain.usage is not None
    assert usages[-1].completion_tokens == plain.usage.completion_tokens


def test_streams_of_several_prompts_keep_their_places(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["Trees", "The sea", "A"], "n": 2, "seed": 3, "max_tokens": 8}
    plain = client.completions.create(**asked)
    streamed: dict[int, str] = defaultdict(str)
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert [streamed[index] for index in range(6)] == [choice.text for choice in plain.choices]


def test_chat_plain_and_streamed_are_what_chat_gives(client: openai.OpenAI, llm: LLM) -> None:
    [wanted] = llm.chat(CHAT, SamplingParams(n=4, seed=5, max_tokens=10), use_tqdm=False)
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "n": 4, "seed": 5, "max_completion_tokens": 10}
    plain = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in plain.choices] == [completion.text for completion in wanted.outputs]
    assert {choice.message.role for choice in plain.choices} == {"assistant"}
    streamed: dict[int, str] = defaultdict(str)
    roles: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        if choice.delta.role:
            roles[choice.index] = choice.delta.role
        streamed[choice.index] += choice.delta.content or ""
    assert [streamed[index] for index in range(4)] == [completion.text for completion in wanted.outputs]
    assert roles == dict.fromkeys(range(4), "assistant")


def test_chat_without_a_limit_uses_the_rest_of_the_context(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say yes."}], temperature=0
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 2


def test_an_answer_that_was_begun_goes_on(client: openai.OpenAI, llm: LLM) -> None:
    """As vLLM's server and `llm.chat` have it: the last turn stays open."""
    begun: list[Any] = [*CHAT, {"role": "assistant", "content": "A colour is"}]
    params = SamplingParams(temperature=0, max_tokens=6)
    [wanted] = llm.chat(begun, params, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    reply = client.chat.completions.create(model=MODEL, messages=begun, temperature=0, max_tokens=6, extra_body=opened)
    assert reply.choices[0].message.content == wanted.outputs[0].text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(wanted.prompt_token_ids)
    url = str(client.base_url).replace("/v1/", "/tokenize")
    told = httpx.post(url, json={"messages": begun, **opened}, headers=client.auth_headers).json()
    assert told["tokens"] == list(wanted.prompt_token_ids)


def test_text_parts_of_a_content_are_joined(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]
    both = [
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        for messages in (CHAT, parts)
    ]
    assert both[0].choices[0].message.content == both[1].choices[0].message.content


def test_logprobs_of_completions(client: openai.OpenAI, llm: LLM) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3)
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=3), use_tqdm=False)
    got, completion = reply.choices[0].logprobs, output.outputs[0]
    assert got is not None
    assert completion.logprobs is not None
    rows = [row[token] for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert got.tokens == [row.decoded_token for row in rows]
    assert got.token_logprobs == pytest.approx([row.logprob for row in rows], abs=1e-4)
    assert [len(top) for top in got.top_logprobs or []] == [3] * 6
    text = reply.choices[0].text
    for offset, token in zip(got.text_offset or [], got.tokens, strict=True):
        assert text[offset:].startswith(token)


def test_echo_with_logprobs_tells_about_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=1, logprobs=1, echo=True
    )
    [choice] = reply.choices
    assert choice.text == "The capital of France is Paris"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["The", " capital", " of", " France", " is", " Paris"]
    told: list[Any] = choice.logprobs.token_logprobs or []
    assert [type(logprob) for logprob in told] == [type(None), *[float] * 5]
    alone = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=0, logprobs=1, echo=True
    )
    assert alone.choices[0].text == "The capital of France is"
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs == pytest.approx(told[:-1], abs=1e-4)


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 6}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == reply.choices[0].message.content
    for entry in logprobs.content:
        assert [len(entry.top_logprobs), entry.top_logprobs[0].token] == [2, entry.token], "greedy takes the likeliest"
        assert bytes(entry.bytes or []).decode() == entry.token
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
        for entry in ((chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]
    bare = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs
    assert bare is not None
    assert [entry.top_logprobs for entry in bare.content or []] == [[]] * 6


def test_stop_cuts_and_says_so(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=20, stop=["\n", "!"]
    )
    assert reply.choices[0].text == " Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].model_dump()["stop_reason"] == "\n"


def test_the_same_seed_gives_the_same_text_and_another_another(client: openai.OpenAI) -> None:
    first, again, other = (
        client.completions.create(model=MODEL, prompt=PROMPT, seed=seed, max_tokens=16).choices[0].text
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_best_of_returns_the_best_first(client: openai.OpenAI, llm: LLM) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=6, seed=1, max_tokens=8)
    [output] = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, seed=1, max_tokens=8), use_tqdm=False)
    assert [choice.text for choice in reply.choices] == [completion.text for completion in output.outputs]
    scores = [choice.model_dump()["score"] for choice in reply.choices]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([completion.score for completion in output.outputs], abs=1e-3)


EXTRAS: list[dict[str, Any]] = [
    {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 4},
    {"strategy": "beam_search", "beam_width": 4, "length_penalty": 0.8, "early_stopping": True},
    {"strategy": "diverse", "diversity_penalty": 2.0, "seed": 9},
    {"bad_words": ["trees"], "min_tokens": 4, "ignore_eos": True, "seed": 2},
    {"allowed_token_ids": [260, 281, 284], "seed": 3},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
def test_extra_fields_act_as_in_python(client: openai.OpenAI, llm: LLM, extra: dict[str, Any]) -> None:
    body = dict(extra)
    seed = body.pop("seed", openai.omit)
    reply = client.completions.create(model=MODEL, prompt=PROMPT, n=2, max_tokens=8, seed=seed, extra_body=body)
    assert [choice.text for choice in reply.choices] == texts(llm, PROMPT, n=2, max_tokens=8, **extra)


def test_logit_bias_has_ids_for_names(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    [paris] = llm.tokenizer.encode(" Paris")
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=1, logit_bias={str(paris): -100}
    )
    assert reply.choices[0].text != " Paris"


def test_token_ids_in_and_out(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode("The capital of France is"), llm.tokenizer.encode("One two three")]
    reply = client.completions.create(
        model=MODEL, prompt=ids, temperature=0, max_tokens=3, extra_body={"return_token_ids": True}
    )
    dumped = [choice.model_dump() for choice in reply.choices]
    assert [choice["prompt_token_ids"] for choice in dumped] == ids
    assert [llm.tokenizer.decode(choice["token_ids"]) for choice in dumped] == [choice["text"] for choice in dumped]
    assert dumped[0]["text"].startswith(" Paris")


def test_a_character_of_several_tokens_is_never_sent_in_halves(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("日本語の🎉")
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=len(ids), stream=True, temperature=0, extra_body={"allowed_token_ids": ids}
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    whole = client.completions.create(
        model=MODEL, prompt="x", max_tokens=len(ids), temperature=0, extra_body={"allowed_token_ids": ids}
    )
    assert "".join(pieces) == whole.choices[0].text


def test_errors_are_the_clients_own_classes(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be less than or equal to 2") as bad:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=3)
    assert [bad.value.param, bad.value.code, bad.value.type] == [
        "temperature",
        "invalid_value",
        "invalid_request_error",
    ]
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.completions.create(model="gpt-4", prompt=PROMPT)
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="sesam", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="stream must be false"):
        client.completions.create(model=MODEL, prompt=PROMPT, best_of=3, stream=True)


async def _chat_many(url: str) -> list[str | None]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sesame") as client:
        replies = await asyncio.gather(
            *(client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=6) for _ in range(8))
        )
    return [reply.choices[0].message.content for reply in replies]


def test_the_asynchronous_client_at_once(url: str) -> None:
    import asyncio

    got = asyncio.run(_chat_many(url))
    assert len(set(got)) == 1
    assert got[0]
