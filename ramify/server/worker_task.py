"""What a worker (a process that speaks HTTP) is told by the server that started it, and what it tells.

    server                                        worker
      Task                     -- one frame -->     what to listen at, and with which limits
      Say ...                  -->                  what loading tells, for /health
      Begin, then a socket     -->                  the models, and the worker's connection to the engine's process
                               <-- Ready            it answers requests

Frames are those between a front and its engine (`remote/frames.py`). When the socket ends, so does the worker.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from ramify.remote.frames import frame_of, read_frame
from ramify.remote.messages import OneModel, TwoModels
from ramify.server.config import ServerConfig

WITHOUT_ENGINE = 3  # exit status of a worker whose engine is lost, or was never there


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Written with its name and the names of its fields."""


class Task(_Message, frozen=True):
    """The numbers of open files are the same in both processes."""

    config: dict[str, Any]
    number: int  # which of the workers it is, from 0
    listener: int  # a file
    limits: int  # a file

    @classmethod
    def of(cls, config: ServerConfig, number: int, *, listener: int, limits: int) -> Task:
        return cls(asdict(config), number, listener, limits)


class Say(_Message, frozen=True):
    text: str


class Model(msgspec.Struct, frozen=True):
    """By the name that clients know."""

    name: str
    build: OneModel | TwoModels
    mixed: tuple[str, str] | None
    created: int


class Begin(_Message, frozen=True):
    models: list[Model]


class Ready(_Message, frozen=True):
    pass


_to_worker = msgspec.msgpack.Decoder(Task | Say | Begin)
_to_server = msgspec.msgpack.Decoder(Ready)


def send(control: socket.socket, message: Task | Say | Begin | Ready, file: int | None = None) -> None:
    """With an open file, if one is given. Raises OSError where the other end is gone."""
    control.sendall(frame_of(msgspec.msgpack.encode(message)))
    if file is not None:
        socket.send_fds(control, [b"+"], [file])


def told(control: socket.socket) -> Iterator[tuple[Task | Say | Begin, int | None]]:
    """What the server tells, until the socket ends; with Begin comes a file."""
    while (content := read_frame(control)) is not None:
        message = _to_worker.decode(content)
        if isinstance(message, Begin):
            _, [file], _, _ = socket.recv_fds(control, 1, 1)
            yield message, file
        else:
            yield message, None


def wait_ready(control: socket.socket) -> bool:
    """Whether the worker came to be ready; False: it ended first."""
    content = read_frame(control)
    if content is None:
        return False
    _to_server.decode(content)
    return True
