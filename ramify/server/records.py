"""Recorder: around everything. Each request gets a time of arrival, a count and, if wanted, a line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPMethod

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)
ARRIVAL = "ramify.arrival"  # in a request's scope: when it came, by the event loop's clock
_RECORD = "ramify.record"
_METHODS = frozenset(HTTPMethod)
Count = Callable[[str, str, int], None]


@dataclass(slots=True)
class Record:
    """What a line of the log tells of a request: counts and names of ours, never what the client wrote."""

    request_id: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None  # the code of the failure, also of one in the middle of a stream

    def line(self, method: str, route: str, status: int | None, seconds: float) -> str:
        parts = [f"{method} {route} {'unanswered' if status is None else status} {seconds:.3f} s"]
        named = (("id", self.request_id), ("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens))
        parts += [f"{name}={value}" for name, value in (*named, ("error", self.error)) if value is not None]
        return " ".join(parts)


def record_of(scope: Scope) -> Record:
    record: Record = scope.setdefault(_RECORD, Record())
    return record


class Recorder:
    """Plain ASGI, which passes streams on as they come. `count` is told method, route and status of every answer."""

    def __init__(self, app: ASGIApp, *, count: Count, log_requests: bool) -> None:
        self._app = app
        self._count = count
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        scope[ARRIVAL] = clock()
        record, status = record_of(scope), None
        # A stranger may send any word, and each that was counted would stay in memory for ever.
        method = scope["method"] if scope["method"] in _METHODS else "unknown"

        def route() -> str:
            """As the application calls it: a path may hold anything."""
            return str(getattr(scope.get("route"), "path", "unknown"))

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._count(method, route(), status)
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            if self._log_requests:
                _log.info("%s", record.line(method, route(), status, clock() - scope[ARRIVAL]))
