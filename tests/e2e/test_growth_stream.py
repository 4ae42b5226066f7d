"""`/ramify/stream` over HTTP with the default model: every event as documented, every refusal in the one shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify import AsyncLLM, OptimalSampling
from ramify.config import DEFAULT_MODEL
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from ramify.server.growth_events import GrowthEvent
from tests.serving import ENGINE_PROCESS, mixture_app, serving

PROMPT = "The best thing about living near the sea is"


@pytest.fixture(scope="module")
def llm() -> AsyncLLM:
    return AsyncLLM(max_model_len=512, generation_config="none", engine_process=ENGINE_PROCESS)


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> Iterator[httpx.Client]:
    with serving(create_app(llm)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """All events of a search, each checked against what the OpenAPI document says of it."""
    events: list[dict[str, Any]] = []
    with client.stream("POST", "/ramify/stream", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        event = json.loads(line)
        GrowthEvent.model_validate(event)
        events.append(event)
    assert [event["type"] for event in events] == ["start", *["steps"] * (len(events) - 2), "end"]
    return events


def replay(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Every child's tokens, as a reader of the stream puts them together."""
    children: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for step in event.get("steps", ()):
            before = dict(children)
            for token in step["tokens"]:
                assert token["position"] == 0 or token["parent"] in before
                children[token["child"]] = [*(before[token["parent"]] if token["position"] else []), token]
    return children


def text_of(tokens: list[dict[str, Any]]) -> str:
    text = ""
    for token in tokens:
        text = text[: len(text) - token["num_taken_back"]] + token["text"]
    return text


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "seed": 7, "temperature": 0.8, "top_logprobs": 5},
        {"n": 2, "best_of": 5, "seed": 7},
        {"n": 3, "strategy": "diverse", "diversity_penalty": 1.0, "seed": 7},
        {"n": 2, "strategy": "beam_search", "beam_width": 3, "top_logprobs": 2},
        {"n": 4, "strategy": "beam_search", "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"n": 2, "seed": 3, "stop": " the"},
    ],
    ids=["parallel", "best-of", "diverse", "beams", "groups", "stop"],
)
def test_the_stream_replayed_is_what_the_plain_route_answers(client: httpx.Client, options: dict[str, Any]) -> None:
    events = stream(client, prompt=PROMPT, max_tokens=14, **options)
    children = replay(events)
    plain = {name: value for name, value in options.items() if name != "top_logprobs"}
    reply = client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 14, "return_token_ids": True, **plain}
    ).json()
    outputs = events[-1]["outputs"]
    assert [output["text"] for output in outputs] == [choice["text"] for choice in reply["choices"]]
    for output, choice in zip(outputs, reply["choices"], strict=True):
        tokens = children[output["child"]]
        assert [token["token_id"] for token in tokens] == choice["token_ids"]
        assert text_of(tokens) == choice["text"]
        assert tokens[-1]["finish_reason"] == choice["finish_reason"]
        assert output["score"] == choice.get("score")
        for token in tokens:
            assert len(token["top"]) in (
                (0,) if "top_logprobs" not in options else (options["top_logprobs"], options["top_logprobs"] + 1)
            )
    assert events[0]["num_prompt_tokens"] == reply["usage"]["prompt_tokens"]


def test_beams_are_ranked_in_every_step(client: httpx.Client) -> None:
    events = stream(client, prompt=PROMPT, max_tokens=6, n=2, strategy="beam_search", beam_width=3)
    steps = [step for event in events[1:-1] for step in event["steps"]]
    assert len(steps) == 6
    for step in steps[:-1]:
        assert sum(not standing["finished"] for standing in step["standings"]) == 3
    assert all(standing["finished"] for standing in steps[-1]["standings"])


def test_best_of_ranks_all_children_at_the_end(client: httpx.Client) -> None:
    events = stream(client, prompt=PROMPT, max_tokens=6, n=2, best_of=5, seed=1)
    *before, last = [step for event in events[1:-1] for step in event["steps"]]
    assert all(step["standings"] == [] for step in before)
    assert sorted(standing["child"] for standing in last["standings"]) == [0, 1, 2, 3, 4]
    scores = [standing["score"] for standing in last["standings"]]
    assert scores == sorted(scores, reverse=True)
    assert events[-1]["usage"]["completion_tokens"] == sum(map(len, replay(events).values()))


def test_two_models_tell_how_they_were_mixed() -> None:
    teacher, student = "Problem: 12 + 30 = ?\nAnswer: 42\nReasoning:", "Problem: 12 + 30 = ?\nReasoning:"
    sampling = OptimalSampling(DEFAULT_MODEL, DEFAULT_MODEL, max_model_len=512)
    truth = sampling.generate([teacher], [student], n=2, max_tokens=10, temperature=0.8, seed=5, use_tqdm=False)
    with serving(mixture_app()) as url, httpx.Client(base_url=url, timeout=60) as client:
        [card] = client.get("/v1/models").json()["data"]
        assert card["mixture"] == {"teacher": DEFAULT_MODEL, "theta": DEFAULT_MODEL}
        events = stream(
            client, prompt=teacher, theta_prompt=student, n=2, max_tokens=10, temperature=0.8, seed=5, top_logprobs=3
        )
    children = replay(events)
    assert [output["text"] for output in events[-1]["outputs"]] == truth.generated_texts
    for child, alphas in enumerate(truth.alpha_history):
        told = [token["mixture"] for token in children[child]]
        assert [mixture["alpha"] for mixture in told] == pytest.approx(alphas, abs=1e-4)
        assert [mixture["kl_theta"] for mixture in told] == pytest.approx(
            truth.diagnostics["kl_theta"][child], abs=1e-4
        )
        assert all(mixture["kl_teacher"] == pytest.approx(mixture["kl_theta"], abs=1e-3) for mixture in told)


def test_a_conversation(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    events = stream(client, messages=messages, max_tokens=8, temperature=0)
    reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    assert events[-1]["outputs"][0]["text"] == reply["choices"][0]["message"]["content"]


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": "a", "n": True}, "n"),
    ({"prompt": "a", "n": "3"}, "n"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": "a", "beam_width": 129, "strategy": "beam_search"}, "n"),
    ({"prompt": "a", "temperature": 2.5}, "temperature"),
    ({"prompt": "a", "temperature": 0, "n": 2}, "n"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_logprobs": 21}, "logprobs"),
    ({"prompt": "a", "top_logprobs": -1}, "top_logprobs"),
    ({"prompt": "a", "strategy": "beam_search", "seed": 1}, "seed"),
    ({"prompt": "a", "strategy": "beam_search", "stop": "x"}, None),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 5_000}, None),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [10**9]}, None),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({}, None),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, None),
    ({"messages": []}, None),
    ({"messages": [{"role": "user"}]}, None),
    ({"prompt": "a", "theta_prompt": "b"}, "theta_prompt"),
    ({"messages": [{"role": "user", "content": "a"}], "theta_prompt": "b"}, None),
    ({"prompt": "a", "stream": True}, "stream"),
    ({"prompt": "a", "output_kind": "delta"}, "output_kind"),
    ({"prompt": "a", "model": "another"}, "model"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[json.dumps(body)[:60] for body, _ in REFUSED])
def test_what_is_refused(client: httpx.Client, llm: AsyncLLM, body: dict[str, Any], param: str | None) -> None:
    before = llm.stats()
    response = client.post("/ramify/stream", json=body)
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert llm.stats() == before, "nothing ran"


def test_the_key_guards_the_stream_and_not_the_page(llm: AsyncLLM) -> None:
    with serving(create_app(llm, ServerConfig(api_key="open sesame"))) as url, httpx.Client(base_url=url) as client:
        assert client.post("/ramify/stream", json={"prompt": "a"}).status_code == 401
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in ("app.js", "base.css", "icon.svg"):
            assert client.get(f"/playground/{name}").status_code == 200
        for name in ("nothing.js", "index.html", "..%2fversion.py", "%2e%2e/version.py"):
            assert client.get(f"/playground/{name}").status_code in (401, 404)
        client.headers["Authorization"] = "Bearer open sesame"
        assert len(stream(client, prompt="a", max_tokens=2)) >= 3


def test_the_openapi_document_describes_the_events(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    described = document["paths"]["/ramify/stream"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert described["schema"] == {"$ref": "#/components/schemas/GrowthEvent"}
    assert {"StartEvent", "StepsEvent", "EndEvent"} <= set(document["components"]["schemas"])
    assert "/" not in document["paths"], "static files are no interface"


def test_the_page_about_it_tells_the_truth(client: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block runs, and what it says of fields is what there is."""
    page = (Path(__file__).parents[2] / "docs" / "playground.md").read_text()
    [block] = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/playground.md", "exec"), {})
    assert capsys.readouterr().out.count("Standing(") >= 8
    described = client.get("/openapi.json").json()["components"]["schemas"]
    for name in ("StartEvent", "GrownToken", "TokenMixture", "Standing"):
        for field in set(described[name]["properties"]) - {"type", "token_id"}:
            assert f"`{field}`" in page, f"{name}.{field} is not told about"
    assert set(re.findall(r"^\*\*(\w+)\*\*:", page, flags=re.MULTILINE)) == {"start", "steps", "end"}


def test_a_reader_who_leaves_frees_the_engine(client: httpx.Client, llm: AsyncLLM) -> None:
    with client.stream(
        "POST", "/ramify/stream", json={"prompt": PROMPT, "n": 4, "max_tokens": 400, "ignore_eos": True}
    ) as response:
        next(response.iter_lines())
    for _ in range(1_000):
        if llm.engine.num_unfinished == 0 and llm.stats()["blocks_in_use"] == 0:
            break
        client.get("/health")
    assert llm.stats()["blocks_in_use"] == 0
