"""A front before the replicas, for routing by prefixes: it reads what a request opens with and tells Serve's router."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger(__name__)
_LONGEST = 2**14  # characters that the router looks at
# What a replica needs to know of a connection; servers add things that cannot be handed to another process.
_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
)
_PEERS = ("client", "server")


@dataclass(frozen=True, slots=True)
class Asked:
    """An HTTP request as it is handed on. `prompt` is what Serve's router by prefixes looks for."""

    prompt: str
    scope: Message
    body: bytes


class Front:
    """The deployment of an application that hands everything on to the replicas."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._app = Passage(replicas.options(stream=True), max_body_bytes)

    def __serve_build_asgi_app__(self) -> Passage:  # the name that Serve asks for
        return self._app


class Passage:
    """Hands requests to the replicas, and what they answer back to the clients, message by message."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._most = max_body_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        body = await _body(receive, self._most)
        if body is None:
            return None
        passed_on = {name: scope[name] for name in (*_SCOPE, *_PEERS) if name in scope}
        answer = self._replicas.answer.remote(Asked(opening(scope["path"], body), passed_on, body))
        has_begun = False
        try:
            async for message in answer:
                has_begun = True
                await send(message)
        except Exception as error:  # the replica is lost, or Serve has no other
            _log.warning("a request was lost: %s", type(error).__name__)
            if has_begun:
                raise
            await _say_lost(scope, receive, send)
        finally:
            answer.cancel()  # does nothing once it is whole; else the client is gone, and the replica learns of it
        return None


def opening(path: str, body: bytes) -> str:
    """The text that a request opens with, or its path where it has none; never empty."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return path
    if not isinstance(fields, dict):
        return path
    told = _text(fields.get("messages")) or _text(fields.get("prompt")) or _text(fields.get("prompt_token_ids"))
    return told[:_LONGEST] or path


def _text(value: Any) -> str:
    """Of messages their contents, of several prompts the first, of token ids their numbers."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        return ""
    if isinstance(value[0], dict):
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        return "\n".join(content if isinstance(content, str) else json.dumps(content) for content in contents)
    if isinstance(value[0], int):
        return " ".join(map(str, value))
    return _text(value[0])


async def _body(receive: Receive, most: int) -> bytes | None:
    """All of it, or one byte more than is allowed, which the replica refuses; None if the client has gone."""
    pieces, length = [], 0
    while length <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        length += len(pieces[-1])
        if not message.get("more_body", False):
            break
    return b"".join(pieces)[: most + 1]


async def _live(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


async def _say_lost(scope: Message, receive: Receive, send: Send) -> None:
    from ramify.server.failures import Failure

    failure = Failure(503, "the replica that had this request is lost: try again", code="replica_lost")
    await failure.response()(scope, receive, send)
