"""A server that answers at once, to measure the client itself: no server can be seen to do more than this one.

Every open stream gets one event a turn, each in a write of its own, as engines send them: a stub that wrote whole
answers at once would flatter the client. It prints its port and ends with its standard input.
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
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Asked(msgspec.Struct):
    max_tokens: int = 16
    n: int = 1
    stream: bool = False
    messages: Any = None


_ASKED = msgspec.json.Decoder(_Asked)


class Stub(asyncio.Protocol):
    """One connection: reads requests of a known shape, and answers them from bytes made before."""

    def __init__(self, streams: dict[Stub, Iterator[bytes]]) -> None:
        self._streams = streams
        self._received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().rpartition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length):
            return
        self._received = b""
        assert self.transport is not None
        if head.startswith(b"GET "):
            self.transport.write(_plain({"data": [{"id": "stub"}]}))
            return
        asked = _ASKED.decode(body)
        if asked.stream:
            self.transport.write(STREAM_HEAD)
            self._streams[self] = _events(asked)
        else:
            self.transport.write(_whole(asked))


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
    streams: dict[Stub, Iterator[bytes]] = {}
    server = await loop.create_server(lambda: Stub(streams), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ended = loop.create_task(reader.read())
    while not ended.done():
        for stub, events in list(streams.items()):
            assert stub.transport is not None
            if stub.transport.get_write_buffer_size() > MAX_UNSENT:
                continue  # the client is behind: its ceiling is being measured
            event = next(events, None)
            if event is None:
                streams.pop(stub, None)
            else:
                stub.transport.write(event)
        await asyncio.sleep(0 if streams else 0.0005)


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
