"""An engine behind a connection, without a process: both sides of it on the two ends of a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ramify.engine.core import EngineCore
from ramify.remote.engine_server import EngineServer
from ramify.remote.link import Link
from ramify.remote.packing import capacity_of
from ramify.remote.remote_engine import RemoteEngine
from ramify.text.codec import TextCodec


def connected(server: EngineServer, codec: TextCodec) -> list[RemoteEngine]:
    """One more front: its engines, one for each model."""
    ours, theirs = socket.socketpair()
    server.admit(theirs)
    link = Link(ours)
    engines = [
        RemoteEngine(link, index, codec, capacity_of(facts)) for index, facts in enumerate(link.wait_ready(print))
    ]
    link.start(list(engines))
    return engines


@contextmanager
def hosting(cores: Sequence[EngineCore]) -> Iterator[EngineServer]:
    server = EngineServer()
    server.open(cores)
    yield server
    server.close()


@contextmanager
def remote(core: EngineCore, codec: TextCodec) -> Iterator[RemoteEngine]:
    """One model, one front."""
    with hosting([core]) as server:
        [engine] = connected(server, codec)
        yield engine
        engine.stop()
