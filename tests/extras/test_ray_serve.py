"""A deployment of Ray Serve with two replicas answers as the server does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import ramify.ray
from ramify import LLM, InvalidInputError, SamplingParams
from ramify.server.config import PairConfig, ServerConfig
from tests.extras.conftest import within

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-extras")

PROMPT = "Natalia sold clips to 48 of her friends"
SECONDS = 120


@pytest.fixture(scope="module")
def url(driver: str, small_model: str) -> Iterator[str]:
    """Two applications: one that routes by prefixes, and at /session one that routes by sessions."""
    from ray import serve

    assert driver
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given: Any = {"num_replicas": 2, "num_cpus": 0.5, "max_model_len": 512, "batch_invariant": True}
    server = ServerConfig(served_model_name="tiny", api_key="sesame", max_body_bytes=4096)
    pair = PairConfig(teacher=small_model, theta=small_model)
    by_prefix = ramify.ray.application(small_model, routing="prefix", server=server, pair=pair, **given)
    by_session = ramify.ray.application(
        small_model, routing="session", server=server, deployment={"name": "sessions"}, **given
    )
    within(60, lambda: serve.start(http_options={"host": "127.0.0.1", "port": port}))
    within(240, lambda: serve.run(by_prefix, name="prefix", route_prefix="/"))
    within(240, lambda: serve.run(by_session, name="session", route_prefix="/session"))
    assert "sessions" in within(30, serve.status).applications["session"].deployments
    yield f"http://127.0.0.1:{port}"
    within(60, serve.shutdown)


@pytest.mark.parametrize("place", ["", "/session"])
def test_the_openai_client_gets_what_one_engine_makes(url: str, place: str, small_model: str) -> None:
    params = SamplingParams(n=2, max_tokens=12, temperature=0.9, seed=7)
    [wanted] = LLM(small_model, max_model_len=512, batch_invariant=True).generate([PROMPT], params, use_tqdm=False)
    texts = [sample.text for sample in wanted.outputs]
    client = openai.OpenAI(base_url=f"{url}{place}/v1", api_key="sesame", timeout=SECONDS, max_retries=0)
    asked = {"model": "tiny", "prompt": PROMPT, "n": 2, "max_tokens": 12, "temperature": 0.9, "seed": 7}
    for _ in range(4):  # whichever replica answers
        answer = client.completions.create(**asked)  # type: ignore[call-overload]
        assert [choice.text for choice in answer.choices] == texts
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    one, *mixtures = [model.id for model in client.models.list().data]
    assert one == "tiny"
    assert len(mixtures) == (place == "")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=-1)
    with pytest.raises(openai.APIStatusError, match="at most 4096 bytes"):
        client.completions.create(model="tiny", prompt=PROMPT * 200)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}{place}/v1", api_key="other", timeout=SECONDS, max_retries=0).models.list()


def cached_tokens(url: str, prompt: str, session: str | None = None) -> int:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", timeout=SECONDS, max_retries=0)
    headers = {} if session is None else {"x-session-id": session}
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_headers=headers)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def test_what_opens_alike_finds_its_prefix_in_a_cache(url: str) -> None:
    for number in range(6):
        prompt = f"Story {number} is one of its own. " * 8
        session = f"session-{number}"
        assert cached_tokens(f"{url}/session", prompt, session) < 32
        assert cached_tokens(f"{url}/session", prompt + "It goes on.", session) >= 48
        assert cached_tokens(url, prompt) < 32
        assert cached_tokens(url, prompt + "It goes on.") >= 48


def test_many_at_once_are_all_answered(url: str) -> None:
    async def ask() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sesame", timeout=SECONDS, max_retries=0)
        answers = await asyncio.gather(
            *(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, seed=seed) for seed in range(24))
        )
        return [answer.choices[0].finish_reason for answer in answers]

    assert within(SECONDS, lambda: asyncio.run(ask())) == ["length"] * 24


def test_what_serve_decides_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="port has no meaning in a deployment"):
        ramify.ray.application(server=ServerConfig(port=9000))
    with pytest.raises(InvalidInputError, match="routing"):
        ramify.ray.application(routing="nearest")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="num_replicas"):
        ramify.ray.application(num_replicas=0)
