"""Where clients connect: the listening socket, and a Gate that lets in as many as the process has files for."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import socket
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from ramify.errors import InvalidInputError
from ramify.server.config import ServerConfig
from ramify.server.failures import Failure, headers_too_large
from ramify.server.limits import Limits
from ramify.server.pipe import give_pipe

_log = logging.getLogger(__name__)
ACCEPTED_AT_ONCE = 8  # connections that the event loop accepts in one turn
_TURNS = 4  # of the event loop, from accepting a connection to closing it
_LINGERING = 8  # connections that are being told that there is no room
_OWN_FILES = 88  # models, logs, sockets of the process itself
_RESERVED = ACCEPTED_AT_ONCE * _TURNS + _LINGERING + _OWN_FILES
KERNEL_QUEUE = 2_048
_LINGER_SECONDS = 1.0
_HEADER_SECONDS = 30.0
_LONGEST_MILLISECONDS = 2**31 - 1
_REASONS = {
    errno.EADDRINUSE: "another program listens there; choose another with --port (0: any free one)",
    errno.EADDRNOTAVAIL: "this machine does not have that address; --host 0.0.0.0 means all that it has",
    errno.EACCES: "that port is reserved for the system; choose one above 1023 with --port",
}


def listener_of(config: ServerConfig) -> socket.socket:
    """A bound socket, or an error that names the address."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(
            f"cannot listen at {config.host!r}: there is no such address ({error.args[-1]})"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _lose_silent_readers(listener, config.request_timeout)
        listener.bind(address)
        listener.listen(KERNEL_QUEUE)  # now: binding alone does not show that another process listens there
    except OSError as error:
        listener.close()
        what = _REASONS.get(error.errno or 0, error.strerror)
        raise InvalidInputError(f"cannot listen at {config.host} port {config.port}: {what}") from None
    return listener


def _lose_silent_readers(listener: socket.socket, seconds: float) -> None:
    """A client that reads nothing for so long is gone, where the system can tell: what waits for it to read would never
    end, and its place be taken for ever. Connections have the option from the socket that accepts them.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, max(1, min(int(seconds * 1000), _LONGEST_MILLISECONDS)))


def address_of(listener: socket.socket) -> str:
    """Where it really listens: port 0 became another one."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit() -> int:
    """Allows this process as many open files as the system lets it have; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def files_for_connections(file_limit: int) -> int:
    """How many of the files that a process may open are left for its clients."""
    return file_limit - min(_RESERVED, file_limit // 2)


def room_for_connections(config: ServerConfig, file_limit: int) -> int:
    """How many connections may be open at once, over all processes: what was asked for, or what the files allow."""
    most = files_for_connections(file_limit) * config.http_workers
    if config.max_connections is None:
        return most
    if config.max_connections > most:
        raise InvalidInputError(
            f"max_connections must be at most {most}, got {config.max_connections}: a process may open {file_limit} "
            "files (ulimit -n)"
        )
    return config.max_connections


class Gate:
    """Counts connections. Tells once when there is no more room, and once when there is again.

    At most `most` over all processes that share the limits, and `most_here` in this one (default: the same).
    """

    def __init__(self, most: int, most_here: int | None = None, limits: Limits | None = None) -> None:
        self.most = most
        self.num_open = 0  # here
        self._most_here = most if most_here is None else most_here
        self._limits = limits if limits is not None else Limits.create(by_client=False)
        self.num_lingering = 0
        self._num_refused = 0
        self._is_starved = False

    def enter(self) -> bool:
        """Whether there is room for one more, which is then taken."""
        if self.num_open >= self._most_here or not self._limits.connect(self.most):
            if not self._num_refused:
                _log.warning("%d connections are open, and no more are taken (--max-connections)", self.most)
            self._num_refused += 1
            return False
        self.num_open += 1
        self._is_starved = False
        return True

    def leave(self) -> None:
        self.num_open -= 1
        self._limits.disconnect()
        if self._num_refused and self.num_open <= self._most_here * 9 // 10:
            _log.warning("connections are taken again; %d were refused", self._num_refused)
            self._num_refused = 0

    def heard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's handler of exceptions: files that run out in spite of all are one line, not thousands."""
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif not self._is_starved:
            self._is_starved = True
            _log.warning("no connection can be accepted for now: %s", context.get("exception"))


class SocketPipe:
    """Writes a body as h11 would, in chunks unless the client is of HTTP 1.0, and nothing else: no copy, no events."""

    __slots__ = ("_flow", "_is_chunked", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, http_version: str) -> None:
        self._transport = transport
        self._flow = flow
        self._is_chunked = http_version == "1.1"

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def drained(self) -> None:
        await self._flow.drain()


class GatedProtocol(H11Protocol):
    """HTTP for those whom the gate lets in; the others get a 503 when they ask. Nobody may send headers for ever."""

    gate: Gate
    _is_inside = False
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.gate.enter():
            self._is_inside = True
            super().connection_made(transport)
            self._wait(_HEADER_SECONDS)
            return
        self.transport = transport
        self.gate.num_lingering += 1
        if self.gate.num_lingering > _LINGERING:
            transport.abort()
        else:
            self._wait(_LINGER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._is_inside:
            self.gate.leave()
            super().connection_lost(exc)
        else:
            self.gate.num_lingering -= 1

    def data_received(self, data: bytes) -> None:
        if not self._is_inside:  # answered only now: closing a socket with unread input would take the answer back
            self.transport.write(_NO_ROOM)
            self.transport.close()
            return
        super().data_received(data)
        if self._is_between_requests:
            self._wait(_HEADER_SECONDS)
        else:
            self._stop_waiting()

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_inside and self.scope is not None and self.cycle is not None:  # its task runs only after this
            give_pipe(cast(Scope, self.scope), SocketPipe(self.transport, self.flow, self.scope["http_version"]))

    def send_400_response(self, _msg: str) -> None:
        """What is no HTTP is answered as all else that is wrong, unless it comes after the answer to its request."""
        state, most = self.conn.our_state, self.config.h11_max_incomplete_event_size
        if state is h11.IDLE and most is not None and len(self.conn.trailing_data[0]) > most:
            self.transport.write(_last_words(headers_too_large(most)))
        elif state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_last_words(Failure(400, "this is no valid HTTP request", code="invalid_http")))
        self.transport.close()

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def protocol_behind(gate: Gate) -> type[GatedProtocol]:
    """The class that uvicorn makes for each connection."""
    return type("Protocol", (GatedProtocol,), {"gate": gate})


def _last_words(failure: Failure) -> bytes:
    """A whole answer, after which the connection is closed."""
    body = json.dumps(failure.as_json()).encode()
    head = [
        f"HTTP/1.1 {failure.status_code} {HTTPStatus(failure.status_code).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in (failure.headers or {}).items()),
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


_NO_ROOM = _last_words(
    Failure(
        503,
        "the server has too many connections: try later",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )
)
