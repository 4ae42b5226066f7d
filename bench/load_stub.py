"""A server that answers at once, to measure the client itself: no server can be seen to do more than this one.

Every open stream gets one event a turn, each in a write of its own, as engines send them. A client that is measured
keeps pace on a connection beside: else the system's buffers would join a hundred events into one read, which flatters
the client. The stub prints its port and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from bench.load_connection import Target

FACTS = {"id": "cmpl-00000000", "object": "text_completion", "created": 0, "model": "stub"}
MAX_UNSENT = 2**16
PACE = b"PACE\r\n"  # what a connection that keeps pace begins with
AHEAD = 2  # turns: the stub writes one while the client reads the other
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Asked(msgspec.Struct):
    max_tokens: int = 16
    n: int = 1
    stream: bool = False
    messages: Any = None


_ASKED = msgspec.json.Decoder(_Asked)


class Turns:
    """Every open stream gets an event a turn. With a client that keeps pace, no more than AHEAD turns are under way."""

    def __init__(self) -> None:
        self.streams: dict[Stub, Iterator[bytes]] = {}
        self.pace: asyncio.Transport | None = None
        self.unanswered = 0
        self.changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            while not self.streams or self.unanswered >= AHEAD:
                self.changed.clear()
                await self.changed.wait()
            for stub, events in list(self.streams.items()):
                assert stub.transport is not None
                if stub.transport.get_write_buffer_size() > MAX_UNSENT:
                    continue  # the client is behind: its ceiling is being measured
                event = next(events, None)
                if event is None:
                    del self.streams[stub]
                else:
                    stub.transport.write(event)
            if self.pace is not None:
                self.pace.write(b".")
                self.unanswered += 1
            await asyncio.sleep(0)


class Stub(asyncio.Protocol):
    """One connection: reads requests of a known shape, and answers them from bytes made before."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        turns = self._turns
        turns.streams.pop(self, None)
        if turns.pace is self.transport:
            turns.pace, turns.unanswered = None, 0
            turns.changed.set()

    def data_received(self, data: bytes) -> None:
        turns = self._turns
        assert self.transport is not None
        if data == PACE or turns.pace is self.transport:
            turns.unanswered = 0 if data == PACE else turns.unanswered - len(data)
            turns.pace = self.transport
            turns.changed.set()
            return
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().rpartition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length):
            return
        self._received = b""
        if head.startswith(b"GET "):
            self.transport.write(_plain({"data": [{"id": "stub"}]}))
            return
        asked = _ASKED.decode(body)
        if asked.stream:
            self.transport.write(STREAM_HEAD)
            turns.streams[self] = _events(asked)
            turns.changed.set()
        else:
            self.transport.write(_whole(asked))


class Echo(asyncio.Protocol):
    """The client's side of keeping pace: its loop answers a turn after it has read that turn's events."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(PACE)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def _usage(asked: _Asked) -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": asked.max_tokens * asked.n}


def _whole(asked: _Asked) -> bytes:
    text = " word" * asked.max_tokens
    one: dict[str, Any] = {"text": text} if asked.messages is None else {"message": {"content": text}}
    choices = [{"index": index, **one} for index in range(asked.n)]
    return _plain({**FACTS, "choices": choices, "usage": _usage(asked)})


def _plain(value: dict[str, Any]) -> bytes:
    content = msgspec.json.encode(value)
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )


def _events(asked: _Asked) -> Iterator[bytes]:
    one: dict[str, Any] = {"text": " word"} if asked.messages is None else {"delta": {"content": " word"}}
    step = b"".join(
        _chunk(msgspec.json.encode({**FACTS, "choices": [{"index": index, **one}]})) for index in range(asked.n)
    )
    for _ in range(asked.max_tokens):
        yield step
    yield (
        _chunk(msgspec.json.encode({**FACTS, "choices": [], "usage": _usage(asked)})) + _chunk(b"[DONE]") + b"0\r\n\r\n"
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    turns = Turns()
    server = await loop.create_server(lambda: Stub(turns), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running = loop.create_task(turns.run())
    ended = loop.create_task(reader.read())
    await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)


@contextmanager
def stubs(count: int) -> Iterator[list[Target]]:
    """As many stub servers as client processes, each for one of them: a single one would be slower than the clients."""
    command = [sys.executable, str(Path(__file__))]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(count)
    ]
    try:
        targets = []
        for process in processes:
            assert process.stdout is not None
            targets.append(Target(host="127.0.0.1", port=int(process.stdout.readline())))
        yield targets
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve())
    os._exit(0)
