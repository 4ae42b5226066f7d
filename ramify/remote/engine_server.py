"""What the engine's process does: loads the models it is told to, then serves them to every front that connects.

A connection gets what loading says (the first one only), then `Ready` or `NotLoaded`, then the outputs of its own
requests. Fronts may come at any time: before, while and after models are loaded.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ramify.config import EngineConfig, MixtureConfig
from ramify.drive.build import Engine, build_engine, build_pair
from ramify.drive.replacing import check_replaceable, replace_weights
from ramify.engine.core import EngineCore
from ramify.errors import ProtocolError, RamifyError
from ramify.remote.connection import Connection
from ramify.remote.host import ModelHost, name_of
from ramify.remote.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    Failed,
    Leave,
    LoadWeights,
    NotLoaded,
    OneModel,
    Ready,
    Refused,
    ResetPrefixCache,
    Said,
    ToEngine,
    TwoModels,
    build_of,
)
from ramify.remote.packing import facts_of, request_of
from ramify.remote.stored_weights import read_stored

_log = logging.getLogger(__name__)


def serve(build: bytes, arrivals: queue.SimpleQueue[socket.socket]) -> None:
    """Does not return: the process ends with its parent, with an engine's thread, or when no model can be loaded."""
    server = EngineServer()
    threading.Thread(target=_admit_all, args=(server, arrivals), name="ramify-arrivals", daemon=True).start()
    logger = logging.getLogger("ramify")
    logger.addHandler(_LogSender(server))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        engines = [_engine(model, server.say) for model in build_of(build).models]
    except BaseException as error:  # told to every front as what it is
        server.refuse(error)
        os._exit(1)
    # Python's collector need not look through a loaded model again and again while tokens are drawn.
    gc.collect()
    gc.freeze()
    server.open([engine.core for engine in engines], [partial(_replace_weights, engine) for engine in engines])
    threading.Event().wait()


class EngineServer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._num_admitted = 0
        self._hosts: list[ModelHost] = []
        self._ready: Ready | None = None
        self._replacers: Sequence[Callable[[str], None]] = ()

    # -- models -------------------------------------------------------------------------------------------------------

    def open(self, cores: Sequence[EngineCore], replacers: Sequence[Callable[[str], None]] = ()) -> None:
        """From now on these are served; `replacers` give each of them other weights, from a folder."""
        self._hosts = [ModelHost(core, index, self.connections) for index, core in enumerate(cores)]
        self._replacers = replacers
        for host in self._hosts:
            threading.Thread(target=_run, args=(host,), name="ramify-engine", daemon=True).start()
        with self._lock:
            self._ready = Ready([facts_of(core.capacity) for core in cores])
            for connection in self._connections:
                self._open(connection)

    def close(self) -> None:
        """Ends the threads that step."""
        for host in self._hosts:
            host.stop()

    def refuse(self, error: BaseException) -> None:
        if not isinstance(error, RamifyError):
            traceback.print_exception(error)
        for connection in self.connections():
            connection.send([NotLoaded(type(error).__name__, str(error))])

    def say(self, text: str) -> None:
        self.tell_first(Said(None, logging.INFO, text))

    def tell_first(self, said: Said) -> None:
        """To the first front, which started this process; to nobody once that is gone."""
        for connection in self.connections()[:1]:
            if connection.key == 0:
                connection.send([said])

    # -- fronts --------------------------------------------------------------------------------------------------------

    def connections(self) -> list[Connection]:
        with self._lock:
            return list(self._connections)

    def admit(self, end: socket.socket) -> None:
        """One more front."""
        with self._lock:
            connection = Connection(end, self._num_admitted)
            self._num_admitted += 1
            self._connections.append(connection)
            if self._ready is not None:
                self._open(connection)

    def _open(self, connection: Connection) -> None:
        assert self._ready is not None
        connection.send([self._ready])
        connection.start(self._hear, self._leave)

    def _hear(self, connection: Connection, message: ToEngine) -> None:
        """In the connection's own thread."""
        if isinstance(message, Leave):
            self._dismiss(connection)
            return
        if not 0 <= message.model < len(self._hosts):
            raise ProtocolError(f"there is no model {message.model}")
        host = self._hosts[message.model]
        match message:
            case Add():
                try:
                    request = request_of(message, name_of(connection, message.number))
                    host.prepare(request)
                except RamifyError as error:
                    connection.send([Failed(message.model, [message.number], type(error).__name__, str(error))])
                    return
                host.do(lambda: host.add(connection, message.number, request, is_told=message.is_told))
            case Abort():
                host.do(lambda: host.abort(name_of(connection, message.number)))
            case Ask():
                connection.send([Answer(message.ticket, host.state())])
            case ResetPrefixCache():
                host.do(host.reset_prefix_cache)
                host.do(lambda: connection.send([Answer(message.ticket, host.state())]))
            case LoadWeights():
                host.do(lambda: self._load_weights(connection, host, message))

    def _load_weights(self, connection: Connection, host: ModelHost, message: LoadWeights) -> None:
        """In the engine's thread, between two steps."""
        try:
            self._replacers[message.model](message.folder)
        except Exception as error:
            if not isinstance(error, RamifyError):
                _log.exception("weights could not be replaced")
            connection.send([Refused(message.ticket, type(error).__name__, str(error))])
            return
        connection.send([Answer(message.ticket, host.state())])

    def _dismiss(self, connection: Connection) -> None:
        """Waits until what a front asked for is aborted and told."""
        for host in self._hosts:
            done = threading.Event()
            host.do(lambda host=host: host.dismiss(connection))  # type: ignore[misc]
            host.do(done.set)
            done.wait()
            turned = threading.Event()  # the outputs of the aborts are sent before the next act is done
            host.do(turned.set)
            turned.wait()
        connection.close()

    def _leave(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
        for host in self._hosts:
            host.do(lambda host=host: host.forget(connection))  # type: ignore[misc]


def _admit_all(server: EngineServer, arrivals: queue.SimpleQueue[socket.socket]) -> None:
    while True:
        server.admit(arrivals.get())


def _engine(model: OneModel | TwoModels, say: Callable[[str], None]) -> Engine[Any]:
    if isinstance(model, OneModel):
        return build_engine(EngineConfig.from_options(**model.options), say, is_replica=True)
    return build_pair(
        EngineConfig.from_options(**model.teacher),
        EngineConfig.from_options(**model.theta),
        MixtureConfig(**model.mixture),
        system_prompts=model.system_prompts,
        enable_chat_template=model.enable_chat_template,
        are_apart=model.are_apart,
        say=say,
        is_replica=True,
    )


def _replace_weights(engine: Engine[Any], folder: str) -> None:
    check_replaceable(engine)
    replace_weights(engine, read_stored(folder))


def _run(host: ModelHost) -> None:
    try:
        host.run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # nobody may wait for a thread that is gone: fronts notice that the process is


class _LogSender(logging.Handler):
    """Lines of the log, to be written where the front writes its own."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self._server = server
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._server.tell_first(Said(record.name, record.levelno, self.format(record)))
