"""Request bodies: bounded in size and depth, and strictly JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ramify.server.config import ServerConfig
from ramify.server.connection import deadline_of, out_of_time
from ramify.server.failures import Failure
from ramify.server.preparing import beside_the_loop

# Strings are skipped whole: brackets inside them nest nothing. One that is not closed reaches to the end: a match that
# has begun never fails, and so no byte is looked at twice, whatever the body holds.
MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_MAX_MARKS = 400_000
_MAX_NAMES = 4_096  # of one object; the checks of fields tell about every name that is wrong
_LONG_BYTES = 2**18


class JsonRequest(Request):
    """Reads no more than the server allows, and no JSON that two parsers may understand differently."""

    @property
    def _limits(self) -> ServerConfig:
        config: ServerConfig = self.app.state.service.config
        return config

    async def body(self) -> bytes:
        if not hasattr(self, "_whole"):
            seconds = self._limits.request_timeout
            try:
                async with asyncio.timeout_at(deadline_of(self.scope, seconds)):
                    self._whole = await self._read(self._limits.max_body_bytes)
            except TimeoutError:
                raise out_of_time(seconds) from None
        return self._whole

    async def _read(self, most: int) -> bytes:
        too_large = Failure(413, f"the body must have at most {most} bytes", code="body_too_large")
        announced = self.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > most:
            raise too_large
        pieces, length = [], 0
        async for piece in self.stream():
            length += len(piece)
            if length > most:
                raise too_large
            pieces.append(piece)
        return b"".join(pieces)

    async def json(self) -> Any:
        body, most = await self.body(), self._limits.max_json_depth
        if len(body) < _LONG_BYTES:
            return parse_json(body, most)
        return await beside_the_loop(partial(parse_json, body, most))


class JsonRoute(APIRoute):
    """A route whose body is read by JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def parse_json(body: bytes, max_depth: int) -> Any:
    """The value of a JSON text. Refuses NaN, infinities, a name given twice, and what is nested too deeply."""
    _check_depth(body, max_depth)
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_once_each)
    except UnicodeDecodeError as error:
        raise Failure(400, f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise Failure(400, message, code="invalid_json") from None
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise Failure(400, f"the body holds a number that is too long: {error}", code="invalid_json") from None


def _check_depth(body: bytes, most: int) -> None:
    if body.count(b"[") + body.count(b"{") <= most:
        return
    depth = 0
    for number, mark in enumerate(MARKS.finditer(body)):
        first = mark[0][:1]
        if first in (b"[", b"{"):
            depth += 1
        elif first in (b"]", b"}"):
            depth -= 1
        if depth > most:
            raise Failure(400, f"the body must be nested at most {most} levels deep", code="nested_too_deeply")
        if number > _MAX_MARKS:
            raise Failure(400, "the body holds too many lists, objects and strings", code="too_many_values")


def _no_constant(name: str) -> float:
    raise Failure(400, f"the body is not JSON: {name} is no number", code="invalid_json")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_NAMES:
        raise Failure(400, f"an object must have at most {_MAX_NAMES} names, got {len(pairs)}", code="too_many_values")
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise Failure(400, f"the body gives {name[:80]!r} twice", code="invalid_json")
        made[name] = value
    return made
