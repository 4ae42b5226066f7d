"""The front before Serve's replicas, and a replica behind it, without Serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.ray.front import Asked, Message, Passage
from ramify.ray.serving import Replica

SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [],
    "extensions": object(),
}
HELLO: list[Message] = [
    {"type": "http.response.start", "status": 200, "headers": []},
    {"type": "http.response.body", "body": b"hello", "more_body": False},
]


class Answer:
    """What a handle of Serve gives: messages, perhaps an error, perhaps never an end."""

    def __init__(self, messages: list[Message], error: Exception | None = None, *, ends: bool = True) -> None:
        self._messages, self._error, self._ends = messages, error, ends
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Message]:
        for message in self._messages:
            yield message
        if self._error is not None:
            raise self._error
        if not self._ends:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


class Client:
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)
        self.got: list[Message] = []

    async def receive(self) -> Message:
        if not self._pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}

    async def send(self, message: Message) -> None:
        self.got.append(message)


def passage(answer: Answer, asked: list[Asked], most: int = 100) -> Passage:
    def remote(request: Asked) -> Answer:
        asked.append(request)
        return answer

    return Passage(SimpleNamespace(answer=SimpleNamespace(remote=remote)), most)


def test_a_request_is_handed_on_and_its_answer_back() -> None:
    asked: list[Asked] = []
    client = Client(b'{"prompt": ', b'"Once"}')
    asyncio.run(passage(Answer(HELLO), asked)(dict(SCOPE), client.receive, client.send))
    assert client.got == HELLO
    [told] = asked
    assert (told.prompt, told.body) == ("Once", b'{"prompt": "Once"}')
    assert "extensions" not in told.scope, "what cannot be handed to another process"


def test_a_body_that_is_too_long_is_cut_where_the_replica_sees_that_it_is() -> None:
    asked: list[Asked] = []
    client = Client(*[b"x" * 60] * 50)
    asyncio.run(passage(Answer(HELLO), asked)(dict(SCOPE), client.receive, client.send))
    assert len(asked[0].body) == 101


def test_a_client_that_goes_takes_its_request_along() -> None:
    asked: list[Asked] = []
    client = Client()
    asyncio.run(passage(Answer(HELLO), asked)(dict(SCOPE), client.receive, client.send))
    assert not asked
    assert not client.got

    async def leave(answer: Answer) -> None:
        client = Client(b"{}")
        answering = asyncio.ensure_future(passage(answer, [])(dict(SCOPE), client.receive, client.send))
        while not client.got:
            await asyncio.sleep(0)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering

    answer = Answer(HELLO[:1], ends=False)
    asyncio.run(leave(answer))
    assert answer.is_cancelled


def test_a_lost_replica_is_told_as_a_failure() -> None:
    client = Client(b"{}")
    asyncio.run(passage(Answer([], RuntimeError("gone")), [])(dict(SCOPE), client.receive, client.send))
    assert client.got[0]["status"] == 503
    assert json.loads(client.got[1]["body"])["error"]["code"] == "replica_lost"
    client = Client(b"{}")
    broken = passage(Answer(HELLO[:1], RuntimeError("gone")), [])
    with pytest.raises(RuntimeError):
        asyncio.run(broken(dict(SCOPE), client.receive, client.send))


def test_a_replica_answers_and_learns_that_a_client_has_gone() -> None:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        heard.append(await receive())
        await send(HELLO[0])
        if scope["path"] == "/wait":
            heard.append(await receive())
        await send(HELLO[1])

    async def read(path: str, most: int) -> list[Message]:
        got: list[Message] = []
        stream = replica.answer(Asked("a", {**SCOPE, "path": path}, b"body"))
        async for message in stream:
            got.append(message)
            if len(got) == most:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return got

    heard: list[Message] = []
    replica = Replica.__new__(Replica)
    replica._app = app  # type: ignore[assignment]
    assert asyncio.run(read("/", 5)) == HELLO
    assert asyncio.run(read("/wait", 1)) == HELLO[:1]
    request = {"type": "http.request", "body": b"body", "more_body": False}
    assert heard[:2] == [request, request]
    assert len(heard) <= 3
