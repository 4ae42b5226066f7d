"""Bad and hostile input over HTTP: each refused in OpenAI's shape, before anything runs, naming what is wrong."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ramify import AsyncLLM
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from tests.serving import ENGINE_PROCESS, core_of, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
VOCABULARY = 49_152


@pytest.fixture(scope="module")
def llm() -> AsyncLLM:
    return AsyncLLM(num_kv_blocks=256, engine_process=ENGINE_PROCESS)


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> Iterator[httpx.Client]:
    with serving(create_app(llm)) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, whose shape every failure shares; nothing in it may tell about the machine."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not re.search(r"Traceback|File \"|/ramify/|/home|site-packages|0x[0-9a-f]{6}", body["error"]["message"])
    error: dict[str, Any] = body["error"]
    return error


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": "3"}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "at most 128"),
    ({"n": 10**30}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 129}, "at most 128"),
    ({"prompt": ["x"] * 65, "n": 2}, "at most 128"),
    ({"strategy": "beam_search", "beam_width": 129}, "at most 128"),
    ({"strategy": "beam_search", "beam_width": 0}, "beam_width"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"strategy": "beam_search", "length_penalty": "1"}, "length_penalty"),
    ({"strategy": "diverse", "n": 2, "diversity_penalty": -1}, "diversity_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "cannot be streamed"),
    ({"prompt": [VOCABULARY]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [[1], [VOCABULARY]]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"١": 1}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
    ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": list(range(1_025))}, "allowed_token_ids"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stop": ""}, "stop.0 string should have at least 1 character"),
    ({"stop": ["a", ""]}, "stop.1 string should have at least 1 character"),
    ({"stop": ["a", 5]}, "stop.1 must be a valid string, got 5"),
    ({"stop": ["a"] * 17}, "stop list should have at most 16 items"),
    ({"stop": "x" * 1_025}, "stop.0 string should have at most 1024 characters"),
    ({"stop": 3}, "stop must be a valid list, got 3"),
    ({"strategy": "beam_search", "early_stopping": 1}, "early_stopping must be true, false or 'never', got 1"),
    ({"response_format": "json"}, "response_format must be a JSON object"),
    ({"response_format": {}}, "response_format.type must be 'text', 'json_object' or 'json_schema', got {}"),
    ({"response_format": {"type": "xml"}}, "response_format.type must be 'text', 'json_object' or 'json_schema'"),
    ({"response_format": {"type": "text", "a": 1}}, "response_format.a is not a field"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name string should match",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 8_192}, "max_model_len"),
    ({"prompt": "word " * 8_200}, "max_model_len"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 2, "temperature": 0}, "n must be 1"),
    ({"best_of": 2, "temperature": 0}, "best_of must be 1"),
    ({"beam_width": 4}, "beam_width"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"diversity_penalty": 1.0}, "diversity_penalty"),
    ({"score": "mean_logprob"}, "score"),
    ({"strategy": "beam_search", "seed": 1}, "seed"),
    ({"strategy": "beam_search", "best_of": 3}, "best_of"),
    ({"strategy": "beam_search", "temperature": 0.5}, "temperature"),
    ({"strategy": "beam_search", "stop": "x"}, "stop"),
    ({"strategy": "beam_search", "stream": True}, "stream"),
    ({"strategy": "sideways"}, "strategy"),
    ({"best_of": 2, "stream": True}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise"),
    ({"suffix": "the end"}, "suffix"),
    ({"use_beam_search": True}, "got True. `strategy` `beam_search` with `beam_width` searches by beams."),
    ({"use_beam_search": 0}, "use_beam_search is not supported: only null and false are accepted, got 0"),
    ({"guided_json": {}}, "guided_json is not supported: only null is accepted, got {}. `structured_outputs` says"),
    ({"priority": 1}, "priority"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"surprise": 1}, "surprise"),
    ({"logits_processors": []}, "logits_processors"),
    ({"detokenize": False}, "detokenize"),
    ({"output_kind": "delta"}, "output_kind"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_FIELDS, ids=lambda value: str(value)[:50])
def test_a_bad_field_of_a_completion(client: httpx.Client, llm: AsyncLLM, fields: dict[str, Any], named: str) -> None:
    steps = llm.stats()["steps"]
    error = refused(client.post(COMPLETIONS, json={"prompt": "x", **fields}))
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert llm.stats()["steps"] == steps, "nothing has run"


def test_a_number_without_end_in_a_schema_is_told_by_the_name_that_was_sent(client: httpx.Client) -> None:
    """JSON has no infinity, but a number that is too large becomes one."""
    wanted = '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1e999}}}'
    body = f'{{"prompt": "x", "response_format": {wanted}}}'
    error = refused(client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"}))
    assert error["message"].startswith("response_format.json_schema.schema must be a JSON schema")
    assert error["param"] == "response_format"


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role is missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not supported"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"chat_template": "{{ messages }}"}, "chat_template is not allowed"),
    ({"chat_template_kwargs": {"surprise": 1}}, "does not read surprise"),
    ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ({"continue_final_message": True}, "continue_final_message needs add_generation_prompt to be False"),
    (
        {"messages": [{"role": "user", "content": ""}]}
        | {"continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message needs a last message whose text",
    ),
    ({"echo": True}, "echo is not supported"),
    ({"documents": [{"text": "x"}]}, "documents is not supported"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "must not differ"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer in 0..20, got 21"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, "messages[1].content is null"),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls is not supported",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function must be an object with a name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported by this model"),
    ({"tool_choice": "required"}, "tool_choice is 'required', which needs tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs must be"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs must be a dict with one of the keys"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls must be a valid boolean"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"prompt": "x"}, "prompt"),
    ({"n": 129}, "at most 128"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_CHATS, ids=lambda value: str(value)[:50])
def test_a_bad_field_of_a_chat(client: httpx.Client, llm: AsyncLLM, fields: dict[str, Any], named: str) -> None:
    steps = llm.stats()["steps"]
    error = refused(client.post(CHAT, json={"messages": MESSAGES, **fields}))
    assert named in error["message"]
    assert llm.stats()["steps"] == steps, "nothing has run"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (
            COMPLETIONS,
            {"prompt": "x", "suffix": None, "logit_bias": {}, "n": 1, "best_of": 1, "echo": False, "stop": None}
            | {
                "stream": False,
                "stream_options": None,
                "user": "me",
                "logprobs": None,
                "presence_penalty": 0,
                "top_p": 1,
            },
        ),
        (COMPLETIONS, {"prompt": "x", "temperature": 0, "seed": 1234, "top_k": 5, "top_p": 0.5, "min_p": 0.1}),
        (COMPLETIONS, {"prompt": "x", "temperature": 0, "top_k": 0, "suffix": ""}),
        (
            CHAT,
            {
                "messages": MESSAGES,
                "tools": [],
                "tool_choice": "none",
                "response_format": {"type": "text"},
                "store": True,
                "user": "me",
                "safety_identifier": "me",
                "prompt_cache_key": "k",
            }
            | {
                "functions": None,
                "modalities": ["text"],
                "metadata": {"run": "7"},
                "service_tier": "auto",
                "audio": None,
            }
            | {"parallel_tool_calls": True, "logprobs": False, "top_logprobs": None, "reasoning_effort": None},
        ),
        (
            COMPLETIONS,  # as clients of vLLM's server send them
            {"prompt": "x", "use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "early_stopping": False}
            | {"priority": 0, "truncate_prompt_tokens": None, "spaces_between_special_tokens": True}
            | {"guided_json": None, "guided_regex": None, "prompt_embeds": None, "return_tokens_as_token_ids": False},
        ),
        (
            CHAT,
            {"messages": MESSAGES, "echo": False, "add_special_tokens": False, "continue_final_message": False}
            | {"documents": None, "mm_processor_kwargs": None, "include_reasoning": True, "prompt_logprobs": None}
            | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        ),
    ],
)
def test_neutral_values_are_accepted(client: httpx.Client, route: str, body: dict[str, Any]) -> None:
    assert client.post(route, json={**body, "max_tokens": 1}).status_code == 200


BAD_BODIES = [
    (b"", "is missing"),
    (b"{", "not JSON"),
    (b"[1]", "JSON object"),
    (b'"x"', "JSON object"),
    (b"\xff\xfe", "UTF-8"),
    (b'{"prompt":"x","temperature":NaN}', "NaN is no number"),
    (b'{"prompt":"x","temperature":-Infinity}', "-Infinity is no number"),
    (b'{"prompt":"x","temperature":1e999}', "temperature"),
    (b'{"prompt":"x","repetition_penalty":1e999}', "repetition_penalty"),
    (b'{"prompt":"x","n":' + b"9" * 5_000 + b"}", "too long"),
    (b'{"prompt":"x","prompt":"y"}', "twice"),
    (b'{"prompt":' + b"[" * 100_000, "nested"),
    (b'{"prompt":' + b"[" * 65 + b"1" + b"]" * 65 + b"}", "64 levels"),
    (b'{"prompt":"\\ud800"}', "surrogate"),
    (b'{"prompt":"x","\\ud800":1}', "unicode string"),
    (b'{"prompt":[' + b"[],".join([b""] * 500_000) + b"[]]}", "too many"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES, ids=lambda value: str(value)[:40])
def test_a_bad_body(client: httpx.Client, body: bytes, named: str) -> None:
    reply = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert named in refused(reply)["message"]


def test_brackets_inside_of_strings_nest_nothing(client: httpx.Client) -> None:
    reply = client.post(COMPLETIONS, json={"prompt": '[{"' * 200, "max_tokens": 1})
    assert reply.status_code == 200


def test_a_body_that_is_not_called_json_is_refused(client: httpx.Client) -> None:
    reply = client.post(COMPLETIONS, content=b'{"prompt":"x"}', headers={"content-type": "text/plain"})
    assert "application/json" in refused(reply)["message"]


def test_bodies_have_a_limit_announced_or_not(client: httpx.Client) -> None:
    large = b'{"prompt":"' + b"x" * (8 * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    assert refused(client.post(COMPLETIONS, content=large, headers=headers), 413)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 2**20):
            yield large[start : start + 2**20]

    assert refused(client.post(COMPLETIONS, content=pieces(), headers=headers), 413)["code"] == "body_too_large"


def test_headers_have_a_limit(client: httpx.Client) -> None:
    url = urlsplit(str(client.base_url))
    with closing(socket.create_connection((url.hostname, url.port), timeout=10)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"x" * 40_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("PUT", COMPLETIONS, 405), ("GET", COMPLETIONS, 405), ("GET", "/v1/models/nope", 404)],
)
def test_routes_that_are_not_there(client: httpx.Client, method: str, path: str, status: int) -> None:
    refused(client.request(method, path), status)


def test_an_unknown_model_is_404(client: httpx.Client) -> None:
    error = refused(client.post(COMPLETIONS, json={"prompt": "x", "model": "gpt-4"}), 404)
    assert [error["param"], error["code"]] == ["model", "model_not_found"]


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("/tokenize", {}, "one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "one of prompt and messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "go with messages"),
        ("/detokenize", {"tokens": [VOCABULARY]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_bodies_of_tokenize(client: httpx.Client, route: str, body: dict[str, Any], named: str) -> None:
    assert named in refused(client.post(route, json=body))["message"]


def test_tokenize_and_back(client: httpx.Client) -> None:
    made = client.post("/tokenize", json={"prompt": "Hello world €"}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 8_192
    assert client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Hello world €"}
    info = client.get("/tokenizer_info").json()
    assert [info["bos_token"], info["eos_token"], info["model_max_length"]] == ["<|im_start|>", "<|im_end|>", 8_192]
    assert "add_generation_prompt" in info["chat_template"]
    assert client.get("/tokenizer_info", params={"model": "nope"}).status_code == 404
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert "<|im_start|>" in chat["token_strs"]


# -- limits that a server sets --------------------------------------------------------------------------------


def test_the_key_guards_every_route_but_health(llm: AsyncLLM) -> None:
    app = create_app(llm, ServerConfig(api_key="ключ-sesame"))
    document = app.openapi()
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        paths = {path for path in document["paths"] if path != "/health"} | {"/docs", "/openapi.json", "/nope"}
        right = "Bearer ключ-sesame".encode()
        for path in paths:
            for header in (None, b"", b"Bearer", b"Bearer sesame", b"Basic " + right[7:], right + b"x", b"Bearer \xff"):
                headers = [] if header is None else [(b"authorization", header)]
                reply = client.get(path, headers=headers)
                error = refused(reply, 401)
                assert error["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models", headers=[(b"authorization", right)]).status_code == 200


def test_a_request_brings_a_template_where_the_server_allows_it(llm: AsyncLLM) -> None:
    with serving(create_app(llm, ServerConfig(allow_chat_template=True))) as url:
        asked = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
        reply = httpx.post(url + CHAT, json={**asked, "chat_template": "{{ messages[0].content }}!"}, timeout=60)
        text = httpx.post(url + "/detokenize", json={"tokens": reply.json()["prompt_token_ids"]}).json()
        assert text == {"prompt": "Hi!"}
        for template in ("{% for x in range(10**9) %}{% endfor %}", "{{ ''.__class__ }}", "{{", "{{ 'x' * 10**9 }}"):
            error = refused(httpx.post(url + CHAT, json={**asked, "chat_template": template}, timeout=60))
            assert "template" in error["message"]


@contextmanager
def held(url: str, count: int) -> Iterator[None]:
    """While this lasts, so many long streams are under way."""
    body = {"prompt": "x", "max_tokens": 4_000, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        streams = []  # httpx closes a stream whose lines nobody holds any more
        for _ in range(count):
            reply = stack.enter_context(httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60))
            streams.append(reply.iter_lines())
            assert next(streams[-1]).startswith("data: ")
        yield


def test_a_full_queue_is_429_with_a_time_to_come_again(llm: AsyncLLM) -> None:
    with serving(create_app(llm, ServerConfig(max_queue=2))) as url, held(url, 2):
        reply = httpx.post(url + COMPLETIONS, json={"prompt": "x"}, timeout=60)
        assert refused(reply, 429)["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) >= 1


def test_a_client_has_a_queue_of_its_own_only_if_the_server_says_so(llm: AsyncLLM) -> None:
    with serving(create_app(llm, ServerConfig(max_queue_per_client=2))) as url, held(url, 1):
        reply = httpx.post(url + COMPLETIONS, json={"prompt": ["x", "y"]}, timeout=60)
        assert refused(reply, 429)["code"] == "client_queue_full"
        assert httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, timeout=60).status_code == 200


def test_a_request_that_takes_too_long_is_ended(llm: AsyncLLM) -> None:
    body = {"prompt": "x", "max_tokens": 4_000, "ignore_eos": True}
    with serving(create_app(llm, ServerConfig(request_timeout=0.5))) as url:
        assert refused(httpx.post(url + COMPLETIONS, json=body, timeout=60), 408)["code"] == "request_timeout"
        streamed = httpx.post(url + COMPLETIONS, json={**body, "stream": True}, timeout=60)
        lines = [line for line in streamed.text.splitlines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert lines[-1] == "data: [DONE]"
        slow = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=30)
        with closing(slow):
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            slow.sendall(b"Content-Length: 100\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_the_engine_is_idle_after_all_of_this(llm: AsyncLLM) -> None:
    waited = threading.Event()
    for _ in range(1_000):
        if llm.stats()["blocks_in_use"] == 0 and llm.engine.num_unfinished == 0:
            break
        waited.wait(0.01)
    assert llm.stats()["blocks_in_use"] == 0
    assert llm.engine.is_sound


def test_a_mistake_of_the_servers_own_is_a_500_that_tells_nothing(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("/home/somebody/secret")

    monkeypatch.setattr(llm.intake, "request", broken)
    with serving(create_app(llm)) as url:
        error = refused(httpx.post(url + COMPLETIONS, json={"prompt": "x"}), 500)
        counted = httpx.get(url + "/metrics").text
    assert [error["code"], error["type"]] == ["internal_error", "server_error"]
    assert "secret" not in error["message"]
    assert 'route="/v1/completions",status="500"' in counted
    assert "secret" in caplog.text, "the log says what happened"


def test_a_fault_of_the_engine_is_a_500_and_shows_in_health(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_plan: object) -> None:
        raise MemoryError("/home/somebody/secret")

    with serving(create_app(llm)) as url:
        with monkeypatch.context() as patch:
            patch.setattr(core_of(llm).device, "launch", broken)
            error = refused(httpx.post(url + COMPLETIONS, json={"prompt": "x"}, timeout=60), 500)
            assert error["code"] == "engine_fault"
            streamed = httpx.post(url + COMPLETIONS, json={"prompt": "x", "stream": True}, timeout=60).text
            assert json.loads(streamed.split("\n")[0].removeprefix("data: "))["error"]["code"] == "engine_fault"
            assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + COMPLETIONS, json={"prompt": "x"}, timeout=60).status_code == 200
        assert httpx.get(url + "/health").status_code == 200


def test_outputs_without_a_token_have_a_score_that_json_can_write(client: httpx.Client) -> None:
    body = {"prompt": "x", "n": 2, "best_of": 2, "strategy": "best_of_n", "allowed_token_ids": [2], "seed": 1}
    reply = client.post(COMPLETIONS, json=body)
    assert reply.status_code == 200
    assert [choice["text"] for choice in reply.json()["choices"]] == ["", ""]
    assert all(isinstance(choice["score"], float) for choice in reply.json()["choices"])
