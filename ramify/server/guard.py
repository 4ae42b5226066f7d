"""Before every route: the size of headers, the API key, and an answer to mistakes of our own."""

from __future__ import annotations

import hashlib
import hmac
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.server.failures import Failure, failure_of, headers_too_large
from ramify.server.records import record_of

_log = logging.getLogger(__name__)


class Guard:
    """Plain ASGI, which passes streams on as they come. `open_paths` need no key: they hold no data."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, open_paths: frozenset[str], max_header_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._digest = None if api_key is None else _digest(api_key.encode())
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("there are no web sockets here")
        refusal = self._refusal(scope)
        if refusal is not None:
            record_of(scope).error = refusal.code
            await refusal.response()(scope, receive, send)
            return
        has_answered = False

        async def noted(message: Message) -> None:
            nonlocal has_answered
            has_answered = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # a mistake of ours: the log says which, the client learns only that there was one
            _log.exception("a request failed")
            failure = failure_of(RuntimeError(type(error).__name__))
            record_of(scope).error = failure.code
            if not has_answered:
                await failure.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        # The HTTP parser bounds only what it waits for: headers that come in one piece may be as long as that is.
        if _header_bytes(scope) > self._max_header_bytes:
            return headers_too_large(self._max_header_bytes)
        if self._digest is None or scope["path"] in self._open_paths or self._has_key(scope):
            return None
        return Failure(
            401,
            "a valid API key is needed: send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _has_key(self, scope: Scope) -> bool:
        """Compares digests: they have one length, and the time it takes tells nothing about the key."""
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(_digest(key.strip(" \t").encode("latin-1", "replace")), self._digest or b"")
        return is_right and kind.lower() == "bearer"


def _header_bytes(scope: Scope) -> int:
    """Of the request line and the headers, near enough: what stands between names and values is counted too."""
    line = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
