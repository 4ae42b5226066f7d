"""The client's end of a request: how long it may take, whether the client is still there, events on their way to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from ramify.server.failures import Failure, failure_of
from ramify.server.records import ARRIVAL, record_of

T = TypeVar("T")
CLIENT_GONE = "client_gone"
_LAST_WORDS_SECONDS = 1.0
_DONE = b"data: [DONE]\n\n"


def client_of(request: Request) -> str:
    """The client's address, which is what it is counted by."""
    return "" if request.client is None else request.client.host


def deadline_of(scope: Scope, seconds: float) -> float:
    arrival: float = scope.get(ARRIVAL, asyncio.get_running_loop().time())
    return arrival + seconds


def out_of_time(seconds: float) -> Failure:
    return Failure(408, f"the request took longer than {seconds:g} s", code="request_timeout")


async def unless_gone(request: Request, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client goes away or the request's time is over."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(request.receive))
    left = deadline_of(request.scope, seconds) - asyncio.get_running_loop().time()
    try:
        done, _ = await asyncio.wait({working, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        if leaving in done:
            raise Failure(499, "the client went away", code=CLIENT_GONE)
        raise out_of_time(seconds)
    finally:
        await _cancel(working, leaving)


class EventStream(Response):
    """Server-sent events. Ends early, and lets go of what it holds, when the client goes away or time is over.

    A client that reads slowly holds up `send`; the outputs that come meanwhile are merged in the engine's stream.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, seconds: float, release: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._events = events
        self._seconds = seconds
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                record_of(scope).error = CLIENT_GONE
        finally:
            await _cancel(sending, leaving)
            self._release()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(deadline_of(scope, self._seconds)):
                async for event in self._events:
                    await send(_body(event))
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):  # perhaps it is the client that does not read
                await _tell(out_of_time(self._seconds), scope, send)
        except Exception as error:  # too late for a status: the stream itself says what happened
            await _tell(failure_of(error), scope, send)
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def _tell(failure: Failure, scope: Scope, send: Send) -> None:
    record_of(scope).error = failure.code
    await send(_body(event_of(failure.as_json())))


def event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def events_of(values: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(event_of, values))


def _body(event: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event, "more_body": True}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
