"""The client's end of a request: how long it may take, whether the client is still there, events on their way to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from ramify.server.events import DONE, EventSource, event_of
from ramify.server.failures import INTERNAL_ERROR, Failure, failure_of
from ramify.server.pipe import Pipe, pipe_of
from ramify.server.records import ARRIVAL, record_of

_log = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_GONE = "client_gone"
_LAST_WORDS_SECONDS = 1.0
_SLOW_SECONDS = 0.1  # a client for whom one write takes so long is slow, where there is no better way to tell


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

    Events are written where they are announced, in the turn of the event loop that brings a step's outputs; the task
    of the response sleeps meanwhile. For a client that reads too slowly it waits until there is room, and what came by
    then goes out joined.
    """

    media_type = "text/event-stream"

    def __init__(self, source: EventSource, *, seconds: float, release: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._source = source
        self._seconds = seconds
        self._release = release
        self._unsent = b""  # the last events, which go out with the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # a mistake of ours is the guard's to tell
            else:
                record_of(scope).error = CLIENT_GONE
        finally:
            await _cancel(sending, leaving)
            self._release()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pipe = pipe_of(scope)
        try:
            async with asyncio.timeout_at(deadline_of(scope, self._seconds)):
                await (self._pass_on(send) if pipe is None else self._pour(pipe))
                await send(_end(self._unsent, self._source.failure, scope))
        except TimeoutError:
            with contextlib.suppress(TimeoutError):  # perhaps it is the client that does not read
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await send(_end(b"", out_of_time(self._seconds), scope))
        finally:
            self._source.hush()

    async def _pour(self, pipe: Pipe) -> None:
        source, turn = self._source, asyncio.Event()

        def came() -> None:
            if not pipe.is_full:
                self._write(pipe, source.news())
            if pipe.is_full or source.is_over:
                turn.set()

        source.listen(came)
        came()  # what was there before anybody listened
        while not source.is_over:
            await turn.wait()
            turn.clear()
            await pipe.drained()
            self._write(pipe, source.news(joined=True))

    def _write(self, pipe: Pipe, data: bytes) -> None:
        if self._source.is_over:
            self._unsent += data
        elif data:
            pipe.write(data)

    async def _pass_on(self, send: Send) -> None:
        """The same by ASGI alone, which tells of a slow client only by the time that it takes."""
        source, turn, clock = self._source, asyncio.Event(), asyncio.get_running_loop().time
        source.listen(turn.set)
        data = source.news()
        while not source.is_over:
            began = clock()
            if data:
                await send(_body(data))
            is_slow = clock() - began > _SLOW_SECONDS
            await turn.wait()
            turn.clear()
            data = source.news(joined=is_slow)
        self._unsent = data


def _end(last: bytes, failure: Exception | None, scope: Scope) -> dict[str, Any]:
    if failure is not None:  # too late for a status: the stream itself says what happened
        told = failure_of(failure)
        if told.code == INTERNAL_ERROR:
            _log.error("a stream failed", exc_info=failure)
        record_of(scope).error = told.code
        last += event_of(told.as_json())
    return _body(last + DONE, more=False)


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
