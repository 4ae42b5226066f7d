"""Before every route: the API key, the time of arrival, a count of answers, an answer to mistakes of our own."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.server.connection import ARRIVAL
from ramify.server.failures import Failure, failure_of

_log = logging.getLogger(__name__)
Count = Callable[[str, str, int], None]


class Guard:
    """Plain ASGI, which passes streams on as they come. `open_paths` need no key: they hold no data."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, open_paths: frozenset[str], count: Count) -> None:
        self._app = app
        self._digest = None if api_key is None else _digest(api_key.encode())
        self._open_paths = open_paths
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("there are no web sockets here")
        scope[ARRIVAL] = asyncio.get_running_loop().time()

        has_answered = False

        async def counted(message: Message) -> None:
            nonlocal has_answered
            if message["type"] == "http.response.start":
                has_answered = True
                route = getattr(scope.get("route"), "path", "unknown")
                self._count(scope["method"], route, message["status"])
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        if self._digest is not None and scope["path"] not in self._open_paths and not self._has_key(scope):
            failure = Failure(
                401,
                "a valid API key is needed: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await failure.response()(scope, receive, counted)
            return
        try:
            await self._app(scope, receive, counted)
        except Exception:  # a mistake of ours: the log says which, the client learns only that there was one
            _log.exception("a request failed")
            if not has_answered:
                await failure_of(RuntimeError()).response()(scope, receive, counted)

    def _has_key(self, scope: Scope) -> bool:
        """Compares digests: they have one length, and the time it takes tells nothing about the key."""
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(_digest(key.strip().encode("latin-1", "replace")), self._digest or b"")
        return is_right and kind.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
