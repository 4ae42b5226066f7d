"""Connections to a server: requests out, answers in, each byte timed when it comes.

HTTP is written and read here by hand, on asyncio's protocols, because the client must not be what is measured: general
clients make some thousand events a second, this one some ten thousand on a core.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time

import msgspec

from bench.load_answer import Answer
from bench.load_http import ResponseReader, WireError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of every route's path, for servers behind others
    api_key: str | None = None

    def request(self, method: str, path: str, content: bytes = b"") -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{key}Accept: */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


class Connection(asyncio.Protocol):
    """One connection with one request at a time. Answers are timed when their bytes come."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_open = False
        self.heard = False  # anything of the present answer
        self._answer: Answer | None = None
        self._response = ResponseReader()
        self._done: asyncio.Future[None] | None = None

    def ask(self, content: bytes, answer: Answer) -> asyncio.Future[None]:
        assert self.transport is not None
        self.heard = False
        self._answer, self._response = answer, ResponseReader()
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(content)
        return self._done

    def close(self) -> None:
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer, response = self._answer, self._response
        if answer is None:
            self.close()  # nobody asked
            return
        try:
            knew = response.status
            pieces = response.feed(data)
            if not self.heard:
                self.heard = True
            if response.status != knew:
                answer.begin(response.status, response.headers.get("content-type", ""))
            for piece in pieces:
                answer.feed(piece, now)
        except WireError as error:
            answer.fail("malformed answer", str(error), now)
            self.close()
            self._end()
            return
        if response.is_complete:
            if not response.stays_open:
                self.close()
            answer.finish(now)
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        answer = self._answer
        if answer is None:
            return
        self._response.close()
        if self._response.is_complete:
            answer.finish(time.monotonic())
        else:
            answer.fail(
                "disconnected",
                f"the server closed the connection: {exc or 'before the answer was whole'}",
                time.monotonic(),
            )
        self._end()

    def _end(self) -> None:
        self._answer = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests over connections that are kept for the next ones."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def ask(self, content: bytes, answer: Answer, timeout: float) -> None:
        """Fills the answer's record; nothing is raised for what a server or a network does."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout):
                while self._idle and connection is None:
                    kept = self._idle.pop()
                    if kept.is_open:
                        connection = kept
                if connection is not None:
                    await connection.ask(content, answer)
                    if answer.record.error == "disconnected" and not connection.heard:
                        # The server had given up the idle connection just then: that is no failure of this request.
                        answer.record.error, answer.record.detail, connection = None, "", None
                if connection is None:
                    connection = await self._connect()
                    await connection.ask(content, answer)
        except TimeoutError:
            answer.fail("timeout", f"no whole answer within {timeout:g} s", time.monotonic())
        except OSError as error:
            kind = "too many open files" if error.errno == errno.EMFILE else "cannot connect"
            answer.fail(kind, why(error), time.monotonic())
        finally:
            if connection is not None:
                if answer.record.ended and answer.record.error != "timeout" and connection.is_open:
                    self._idle.append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        target = self._target
        transport, connection = await loop.create_connection(Connection, target.host, target.port, ssl=self._tls)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


async def fetch(target: Target, method: str, path: str, content: bytes = b"", timeout: float = 30) -> tuple[int, bytes]:
    """A single request's status and body; raises OSError, TimeoutError or WireError."""
    tls = ssl.create_default_context() if target.tls else None
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
        try:
            writer.write(target.request(method, path, content))
            response, pieces = ResponseReader(), []
            while not response.is_complete:
                data = await reader.read(1 << 16)
                if data:
                    pieces += response.feed(data)
                else:
                    response.close()
                    if not response.is_complete:
                        raise WireError("the server closed the connection before its answer was whole")
            return response.status, b"".join(pieces)
        finally:
            writer.close()


def why(error: OSError) -> str:
    """Without the address, which the reader knows."""
    if isinstance(error, socket.gaierror | ssl.SSLError) or not error.errno:
        return str(error)
    return os.strerror(error.errno)
