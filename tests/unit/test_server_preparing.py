"""Requests that are being tokenized: they have their place in the queue, and the end of the server waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ramify import AsyncEngine, Request
from ramify.drive.intake import Intake
from ramify.server.app import app_of
from ramify.server.config import ServerConfig
from ramify.server.front import _drain
from ramify.server.service import ServedModel, Service
from ramify.text.codec import TextCodec
from tests.fake import fake_engine

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/ramify/stream": {"prompt": "x", "max_tokens": 2},
}
LONG = " " * 2**15  # around a body: what is long is tokenized beside the event loop


class SlowIntake(Intake):
    """Tokenizes whatever it is given as three tokens, once it is let through."""

    num_begun = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(TextCodec(None), vocab_size=64, max_logprobs=20, **options)
        self.through = threading.Event()

    def request(self, *given: Any, **_options: Any) -> Request:
        self.num_begun += 1
        assert self.through.wait(20)
        _, params, name = given
        return super().request([5, 6, 7], params, name)

    chat_request = request


@contextmanager
def slow_service(**config: Any) -> Iterator[tuple[Service, SlowIntake]]:
    core = fake_engine()
    engine, intake = AsyncEngine(core), SlowIntake(check_request=core.check)
    service = Service(ServerConfig(**config))
    service.open([ServedModel("slow", engine, intake, 64)])
    yield service, intake
    engine.stop()


async def ask(service: Service, route: str) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        content = json.dumps(ASKED[route]) + LONG
        return await client.post(route, content=content, headers={"Content-Type": "application/json"})


async def begun(intake: SlowIntake) -> None:
    async with asyncio.timeout(20):
        while not intake.num_begun:
            await asyncio.sleep(0.001)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("route", ASKED)
def test_a_full_queue_refuses_before_anything_is_tokenized(route: str) -> None:
    """A crowd's texts were all tokenized, each in a thread that others waited for, to be refused afterwards."""

    async def body() -> None:
        with slow_service(max_queue=1) as (service, intake):
            first = asyncio.create_task(ask(service, route))
            await begun(intake)
            refused = await ask(service, route)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert intake.num_begun == 1
            intake.through.set()
            assert (await first).status_code == 200
            assert (await ask(service, route)).status_code == 200, "its place is free again"
            assert service.num_prompts == 0

    run(body)


@pytest.mark.parametrize("route", ASKED)
def test_the_end_waits_for_a_request_that_is_being_tokenized(route: str) -> None:
    """It was not among those that run, so the grace time was over at once, and it came to an engine that ended."""

    async def body() -> None:
        with slow_service() as (service, intake):
            asked = asyncio.create_task(ask(service, route))
            await begun(intake)
            ending = asyncio.create_task(_drain(service, 20, asyncio.Event()))
            await asyncio.sleep(0.1)
            assert not ending.done()
            intake.through.set()
            assert (await asked).status_code == 200
            await ending

    run(body)


@pytest.mark.parametrize("route", ASKED)
def test_after_the_grace_time_a_request_that_was_being_tokenized_is_refused(route: str) -> None:
    async def body() -> None:
        with slow_service() as (service, intake):
            asked = asyncio.create_task(ask(service, route))
            await begun(intake)
            await _drain(service, 0, asyncio.Event())
            intake.through.set()
            reply = await asked
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "shutting_down"

    run(body)
