"""Tools over HTTP: the openai client against a real server whose model writes what a script says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from ramify.server.app import app_of
from ramify.server.config import ServerConfig
from ramify.server.service import Service
from tests.scripted import Script, bytes_codec, scripted_model
from tests.serving import serving

_MESSAGES = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
_CALLS = "{% for c in m.tool_calls or [] %}CALL{% endfor %}{{ m.tool_call_id or '' }}{% endfor %}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_HERMES_CALL = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
)
_LLAMA_CALL = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{# ipython #}'
HERMES = _TOOLS + _MESSAGES + _CALLS.replace("CALL", _HERMES_CALL)
LLAMA = _TOOLS + _MESSAGES + _CALLS.replace("CALL", _LLAMA_CALL)
OTHER = _TOOLS + _MESSAGES + _CALLS.replace("CALL", "<function={{ c.function.name }}>")
PLAIN = _MESSAGES + "{% endfor %}"

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Köln?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'
ANSWERS = {
    "hermes": f'I look. \n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "special": f'I look. \n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "llama": f'I look. \n<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "time"}}',
}
FORMATS = sorted(ANSWERS)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Script]]:
    """By the names of their models; "" is the address."""
    with ExitStack() as open_models:
        codecs = {
            "hermes": bytes_codec(HERMES),
            "special": bytes_codec(HERMES, ["<tool_call>", "</tool_call>"]),
            "llama": bytes_codec(LLAMA, ["<|python_tag|>"]),
            "other": bytes_codec(OTHER),
            "plain": bytes_codec(PLAIN),
        }
        opened = {name: open_models.enter_context(scripted_model(codec, name)) for name, codec in codecs.items()}
        service = Service(ServerConfig())
        service.open([model for model, _ in opened.values()])
        url = open_models.enter_context(serving(app_of(service)))
        scripts = {name: script for name, (_, script) in opened.items()}
        scripts["hermes"].url = url
        yield scripts


@pytest.fixture(scope="module")
def url(scripts: dict[str, Script]) -> str:
    return scripts["hermes"].url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **options: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as clients do."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            made = choices.setdefault(choice.index, {"content": "", "calls": {}, "end": None, "chunks": []})
            made["content"] += choice.delta.content or ""
            made["chunks"].append(choice.delta)
            made["end"] = choice.finish_reason or made["end"]
            for piece in choice.delta.tool_calls or []:
                call = made["calls"].setdefault(piece.index, {"id": piece.id, "name": None, "arguments": ""})
                assert piece.function is not None
                call["name"] = call["name"] or piece.function.name
                call["arguments"] += piece.function.arguments or ""
    return choices


@pytest.mark.parametrize("model", FORMATS)
def test_calls_come_back_whole(client: openai.OpenAI, scripts: dict[str, Script], model: str) -> None:
    scripts[model].texts = [ANSWERS[model]]
    [choice] = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls or []
    assert [call.type for call in calls] == ["function", "function"]
    functions = [call.function for call in calls if call.type == "function"]
    assert [(each.name, each.arguments) for each in functions] == [("weather", ARGUMENTS), ("time", "{}")]
    assert len({call.id for call in calls}) == 2
    assert json.dumps(WEATHER, ensure_ascii=False) in scripts[model].prompt


@pytest.mark.parametrize("model", FORMATS)
def test_calls_are_streamed_as_they_are_written(client: openai.OpenAI, scripts: dict[str, Script], model: str) -> None:
    scripts[model].texts = [ANSWERS[model]]
    choices = streamed(client, model=model, messages=ASKED, tools=TOOLS)
    assert list(choices) == [0]
    assert choices[0]["content"] == "I look."
    assert choices[0]["end"] == "tool_calls"
    calls = choices[0]["calls"]
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [("weather", ARGUMENTS), ("time", "{}")]
    assert all(call["id"].startswith("call_") for call in calls.values())
    with_arguments = [delta for delta in choices[0]["chunks"] if delta.tool_calls]
    assert len(with_arguments) > len(ARGUMENTS) / 2, "in pieces"


def test_the_openai_client_puts_a_stream_together_itself(client: openai.OpenAI, scripts: dict[str, Script]) -> None:
    scripts["hermes"].texts = [ANSWERS["hermes"]]
    with client.chat.completions.stream(model="hermes", messages=ASKED, tools=TOOLS) as stream:
        [choice] = stream.get_final_completion().choices
    assert [call.function.name for call in choice.message.tool_calls or []] == ["weather", "time"]
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [ARGUMENTS, "{}"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_choice_is_read_on_its_own(client: openai.OpenAI, scripts: dict[str, Script], is_streamed: bool) -> None:
    call, broken = '<tool_call>{"name": "time", "arguments": {}}</tool_call>', 'Or: <tool_call>{"name": oops'
    scripts["hermes"].texts = [call, "No call.", broken]
    options: dict[str, Any] = {"model": "hermes", "messages": ASKED, "tools": TOOLS, "n": 12, "seed": 3}
    found = set()
    if is_streamed:
        for choice in streamed(client, **options).values():
            found.add((choice["content"], tuple(call["name"] for call in choice["calls"].values()), choice["end"]))
    else:
        for each in client.chat.completions.create(**options).choices:
            names = tuple(call.function.name for call in each.message.tool_calls or [] if call.type == "function")
            found.add((each.message.content or "", names, each.finish_reason))
    assert found == {("", ("time",), "tool_calls"), ("No call.", (), "stop"), (broken, (), "stop")}


def test_a_call_that_is_cut_off_is_content(client: openai.OpenAI, scripts: dict[str, Script]) -> None:
    scripts["hermes"].texts = [ANSWERS["hermes"]]
    [choice] = client.chat.completions.create(model="hermes", messages=ASKED, tools=TOOLS, max_tokens=60).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content == ANSWERS["hermes"][:60]


def test_one_call_alone(client: openai.OpenAI, scripts: dict[str, Script]) -> None:
    scripts["hermes"].texts = [ANSWERS["hermes"]]
    options: dict[str, Any] = {"model": "hermes", "messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False}
    [choice] = client.chat.completions.create(**options).choices
    assert len(choice.message.tool_calls or []) == 1
    assert len(streamed(client, **options)[0]["calls"]) == 1


def test_tokens_and_logprobs_are_told_of_what_is_held_back_too(
    client: openai.OpenAI, scripts: dict[str, Script]
) -> None:
    scripts["hermes"].texts = [ANSWERS["hermes"]]
    num_tokens = len(ANSWERS["hermes"].encode()) + 1
    chunks = list(
        client.chat.completions.create(
            model="hermes",
            messages=ASKED,
            tools=TOOLS,
            logprobs=True,
            stream=True,
            extra_body={"return_token_ids": True},
        )
    )
    told = [choice for chunk in chunks for choice in chunk.choices]
    assert sum(len(choice.logprobs.content or []) for choice in told if choice.logprobs) == num_tokens
    assert sum(len((choice.model_extra or {}).get("token_ids", [])) for choice in told) == num_tokens


def test_none_offers_no_tools(client: openai.OpenAI, scripts: dict[str, Script]) -> None:
    for model in ("hermes", "plain"):
        scripts[model].texts = [ANSWERS["hermes"]]
        reply = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, tool_choice="none")
        assert reply.choices[0].message.content == ANSWERS["hermes"]
        assert "weather of a city" not in scripts[model].prompt


@pytest.mark.parametrize(
    ("model", "written"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}</tool_call>'),
        ("llama", '{"name": "weather", "parameters": {"city": "Köln", "days": [1, 2]}}'),
    ],
)
def test_calls_and_results_travel_back_into_the_template(
    client: openai.OpenAI, scripts: dict[str, Script], model: str, written: str
) -> None:
    scripts[model].texts = [ANSWERS[model]]
    answer = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS).choices[0].message
    calls = answer.tool_calls or []
    scripts[model].texts = ["It rains."]
    messages = [*ASKED, answer.model_dump(), {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
    [choice] = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices
    assert choice.message.content == "It rains."
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    prompt = scripts[model].prompt
    assert f"[assistant]I look.{written}" in prompt
    assert prompt.endswith(f"[tool]rain{calls[0].id}")


# -- calls that must be made ----------------------------------------------------------------------------------

CELL: Any = {
    "type": "function",
    "function": {
        "name": "cell",
        "parameters": {
            "type": "object",
            "properties": {"row": {"$ref": "#/$defs/place"}, "column": {"$ref": "#/$defs/place"}},
            "required": ["row", "column"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["a", "b"]}},
        },
        "strict": True,
    },
}


@pytest.mark.parametrize(("model", "is_named"), [("hermes", False), ("llama", True)])
def test_a_call_is_made_whatever_the_model_would_rather_write(
    client: openai.OpenAI, scripts: dict[str, Script], model: str, is_named: bool
) -> None:
    pytest.importorskip("llguidance")
    scripts[model].texts = ["I would rather talk."]
    choice: Any = {"type": "function", "function": {"name": "cell"}} if is_named else "required"
    options: dict[str, Any] = {"model": model, "messages": ASKED, "tools": [TIME, CELL], "tool_choice": choice}
    options |= {"n": 2, "seed": 1, "max_tokens": 400}
    found = set()
    reply = client.chat.completions.create(**options, extra_body={"return_token_ids": True})
    prompt = scripts[model].codec.decode((reply.model_extra or {})["prompt_token_ids"])
    assert prompt.endswith("<answer>" if model == "llama" else "<answer><tool_call>\n"), "as the model begins a call"
    for each in reply.choices:
        [call] = each.message.tool_calls or []
        assert call.type == "function"
        found.add((call.function.name, tuple(json.loads(call.function.arguments).items())))
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)
    allowed = {("cell", (("row", row), ("column", column))) for row in "ab" for column in "ab"}
    assert found <= allowed | (set() if is_named else {("time", ())})
    told = set()
    for streamed_choice in streamed(client, **options).values():
        [streamed_call] = streamed_choice["calls"].values()
        told.add((streamed_call["name"], tuple(json.loads(streamed_call["arguments"]).items())))
        assert (streamed_choice["end"], streamed_choice["content"]) == ("tool_calls", "")
    assert told == found


@pytest.mark.parametrize("model", FORMATS)
def test_a_strict_function_is_called_soundly_or_not_at_all(
    client: openai.OpenAI, scripts: dict[str, Script], model: str
) -> None:
    """The model decides whether; what it would rather write as arguments does not matter."""
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"model": model, "messages": ASKED, "tools": [TIME, CELL], "seed": 1, "max_tokens": 200}
    scripts[model].texts = ["I would rather talk."]
    [choice] = client.chat.completions.create(**options).choices
    assert (choice.message.content, choice.message.tool_calls) == ("I would rather talk.", None)
    scripts[model].texts = [ANSWERS[model].replace("weather", "cell")]  # of a city
    [choice] = client.chat.completions.create(**options).choices
    call = (choice.message.tool_calls or [])[0]
    assert call.type == "function"
    assert call.function.name == "cell"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"row", "column"}
    assert set(arguments.values()) <= {"a", "b"}
    told = streamed(client, **options)[0]["calls"][0]
    assert (told["name"], told["arguments"]) == ("cell", call.function.arguments)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_schema_that_cannot_be_followed_is_told_by_its_field(url: str, choice: str) -> None:
    pytest.importorskip("llguidance")
    function = {"name": "f", "parameters": {"type": "object", "minProperties": "x"}, "strict": True}
    tools = [{"type": "function", "function": function}]
    body = {"model": "hermes", "messages": ASKED, "tools": tools, "tool_choice": choice}
    error = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert error["message"].startswith("tools: the parameters of these functions cannot be followed")
    assert error["param"] == "tools"


def test_another_structure_beside_a_forced_call_is_refused(url: str) -> None:
    body = {"model": "hermes", "messages": ASKED, "tools": TOOLS, "tool_choice": "required"}
    reply = httpx.post(
        f"{url}/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}}, timeout=60
    )
    assert reply.status_code == 400
    assert "must be left out where tool_choice" in reply.json()["error"]["message"]


# -- refusals -------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model": "plain"}, "tools are not supported by this model: its chat template has no place for them"),
    ({"model": "other"}, "--tool-call-parser names one: hermes, llama3_json"),
    ({"tools": "weather"}, "tools must be a"),
    ({"tools": [7]}, "tools[0] must be an object with type and function, got 7"),
    ({"tools": [{"type": "web"}]}, "tools[0].type must be 'function', got 'web'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function must be an object with a name, got None"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name must be 1 to 128 letters"),
    ({"tools": [TIME, TIME]}, "tools[1] has the name 'time', which another tool has already"),
    ({"tools": [TIME] * 129}, "tools must be at most 128, got 129"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "parameters must be a JSON schema",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "more": 1}}]}, "tools[0].function.more is not known"),
    ({"tool_choice": "always"}, "tool_choice must be 'none', 'auto', 'required' or {"),
    ({"tool_choice": {"type": "function", "function": {"name": "wheel"}}}, "tool_choice names 'wheel', which is not"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice is 'required', which needs tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls must be a valid boolean"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs must not name 'tools'"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments must be a JSON object as text, got '{'",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSALS, ids=[said[:50] for _, said in REFUSALS])
def test_what_is_wrong_is_told_by_its_place(url: str, change: dict[str, Any], said: str) -> None:
    reply = httpx.post(
        f"{url}/v1/chat/completions", json={"model": "hermes", "messages": ASKED, "tools": TOOLS, **change}, timeout=60
    )
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_tokens_of_a_chat_with_tools_are_those_of_its_prompt(url: str, scripts: dict[str, Script]) -> None:
    body = {"model": "hermes", "messages": ASKED, "tools": TOOLS}
    scripts["hermes"].texts = ["x"]
    reply = httpx.post(f"{url}/v1/chat/completions", json={**body, "return_token_ids": True}, timeout=60).json()
    tokens = httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]
    assert tokens == reply["prompt_token_ids"]
