"""`serve`: listens at once, loads the models meanwhile, and ends without leaving a client waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import uvicorn
from prometheus_client import disable_created_metrics

from ramify.errors import EngineLostError
from ramify.server.app import app_of
from ramify.server.config import ServerConfig
from ramify.server.listening import (
    ACCEPTED_AT_ONCE,
    KERNEL_QUEUE,
    Gate,
    address_of,
    listener_of,
    protocol_behind,
    raise_file_limit,
    room_for_connections,
)
from ramify.server.logs import logging_to_stderr
from ramify.server.service import ServedModel, Service
from ramify.server.signals import SignalWatch
from ramify.server.throughput import log_throughput

_log = logging.getLogger(__name__)
T = TypeVar("T")
LoadModels = Callable[[Callable[[str], None]], Sequence[ServedModel]]  # tells what it does
_LAST_SECONDS = 5.0  # after the aborts: for the last bytes on their way


class _Uvicorn(uvicorn.Server):
    """Without its own signal handlers: they raise the signal again, and a clean end would exit with status 143."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The event loop sets the system's queue of new connections to what it accepts in one turn: too short."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(KERNEL_QUEUE)


def serve(config: ServerConfig, load_models: LoadModels) -> None:
    """Listens at once and answers 503 until the models are loaded; returns when SIGTERM or Ctrl-C has ended it.

    After the signal no request is taken, running ones get the grace period, then they are ended with an error. A
    second signal ends them at once, a third the process. Whatever keeps the event loop busy, the process ends some
    seconds after that. What `load_models` raises is raised here, and so is the loss of an engine: open requests have
    then ended with an error.
    """
    # The process is ours: no second series beside every counter, and as many connections as the system allows.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    gate = Gate(room_for_connections(config, raise_file_limit()))
    with logging_to_stderr(), asyncio.Runner() as runner, contextlib.closing(listener_of(config)) as listener:
        ends = _Ends(runner.get_loop())
        steps = (config.grace_period + 2 * _LAST_SECONDS, ends.ask), (_LAST_SECONDS, ends.insist)
        with SignalWatch(steps):
            is_loading = runner.run(_serve(config, load_models, listener, gate, ends))
    if is_loading:
        os._exit(0)  # torch ends the process with a fault if the interpreter ends while a thread computes


class _Ends:
    """What signals ask of the event loop; set from their own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.soon, self.at_once = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        self._loop.call_soon_threadsafe(self.soon.set)

    def insist(self) -> None:
        self._loop.call_soon_threadsafe(self.at_once.set)


async def _serve(
    config: ServerConfig, load_models: LoadModels, listener: socket.socket, gate: Gate, ends: _Ends
) -> bool:
    """Returns whether a thread is still loading models, which nobody waits for."""
    began = time.monotonic()
    asyncio.get_running_loop().set_exception_handler(gate.heard)
    service = Service(config)
    server = _Uvicorn(
        uvicorn.Config(
            app_of(service),
            http=protocol_behind(gate),  # on h11, which bounds the size of headers
            backlog=ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=config.max_header_bytes,
            ws="none",
            log_level="error",  # what clients do wrong they are told, and the log is not theirs to fill
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(config.grace_period + _LAST_SECONDS) + 1,
        )
    )
    _log.info("Loading; %s answers 503 until then", address_of(listener))
    listening = asyncio.create_task(server.serve(sockets=[listener]))
    reporting: asyncio.Task[None] | None = None
    thread, loading = _in_daemon_thread(partial(load_models, service.say))
    try:
        models = await _unless(ends.soon, loading)
        if models is not None:
            service.open(models)
            _watch(service, ends)
            # Python's collector need not look through a loaded model again and again while tokens are drawn.
            gc.collect()
            gc.freeze()
            names, seconds = ", ".join(service.models), time.monotonic() - began
            _log.info("Serving %s at %s after %.1f s (Ctrl-C ends)", names, address_of(listener), seconds)
            if config.log_interval:
                reporting = asyncio.create_task(log_throughput(service, config.log_interval))
            await ends.soon.wait()
        service.is_draining = True
        server.should_exit = True
        if service.loss is not None:
            _log.error("Ending: %s", service.loss)
        elif service.num_unfinished:
            _log.info("Ending: %d prompts have up to %g s", service.num_unfinished, config.grace_period)
        await _drain(service, config.grace_period, ends.at_once)
    finally:
        server.should_exit = True
        await listening
        if reporting is not None:
            reporting.cancel()
        for model in service.models.values():
            await asyncio.to_thread(model.engine.stop)
    if service.loss is not None:
        raise service.loss
    return thread.is_alive()


def _watch(service: Service, ends: _Ends) -> None:
    """The end of an engine is the server's: clients are told, and whoever started the server may start another."""

    def lose(error: EngineLostError) -> None:
        service.loss = error
        ends.ask()

    for model in service.models.values():
        model.engine.when_lost(lose)


async def _unless(ending: asyncio.Event, loaded: asyncio.Future[T]) -> T | None:
    """What was loaded, or None if the end came first."""
    end = asyncio.ensure_future(ending.wait())
    try:
        waited: set[asyncio.Future[Any]] = {loaded, end}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return loaded.result() if loaded.done() else None
    finally:
        end.cancel()
        loaded.cancel()


async def _drain(service: Service, seconds: float, at_once: asyncio.Event) -> None:
    """Lets requests end by themselves for a while, then aborts what is left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.num_unfinished and not at_once.is_set():
                await asyncio.sleep(0.02)
    for model in service.models.values():
        model.engine.abort_all()


def _in_daemon_thread(
    load: Callable[[], Sequence[ServedModel]],
) -> tuple[threading.Thread, asyncio.Future[Sequence[ServedModel]]]:
    """A model may take minutes to load: a thread that nobody waits for, so that Ctrl-C ends the process at once."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Sequence[ServedModel]] = loop.create_future()

    def tell(models: Sequence[ServedModel] | None, error: BaseException | None) -> None:
        if loaded.cancelled():
            return
        if error is not None:
            loaded.set_exception(error)
        else:
            loaded.set_result(models or [])

    def run() -> None:
        models, error = None, None
        try:
            models = load()
        except BaseException as raised:  # raised again by whoever waits for the models
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, models, error)

    thread = threading.Thread(target=run, name="ramify-load", daemon=True)
    thread.start()
    return thread, loaded
