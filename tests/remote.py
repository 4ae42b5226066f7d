"""An engine behind a connection, without a process: both sides of it on the two ends of a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from ramify.engine.core import EngineCore
from ramify.remote.engine_server import EngineServer
from ramify.remote.link import Link
from ramify.remote.packing import capacity_of
from ramify.remote.remote_engine import RemoteEngine
from ramify.replicas.replica_core import ReplicaCore
from ramify.replicas.replica_engine import ReplicaEngine
from ramify.text.codec import TextCodec

Face = TypeVar("Face", ReplicaCore, ReplicaEngine)


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


@contextmanager
def replicated(
    cores: Sequence[EngineCore], codec: TextCodec, face: type[Face]
) -> Iterator[tuple[Face, list[EngineServer]]]:
    """One model in several engines, and these: whoever closes all connections of one has ended it."""
    with ExitStack() as stack:
        servers = [stack.enter_context(hosting([core])) for core in cores]
        links = []
        for server in servers:
            ours, theirs = socket.socketpair()
            server.admit(theirs)
            links.append(Link(ours))
        facts = [link.wait_ready(print)[0] for link in links]
        engine = face(links, 0, codec, capacity_of(facts[0]), seed=0)
        for link, letters in zip(links, engine.pool.letters, strict=True):
            link.start([letters])
        engine.stats()
        yield engine, servers
        engine.stop()


def end(server: EngineServer) -> None:
    """As if its process had been killed: what it computes from now on is heard by nobody."""
    for connection in server.connections():
        connection.close()
