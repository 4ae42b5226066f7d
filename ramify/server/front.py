"""A process that speaks HTTP: listens at once, loads its models meanwhile, and lets no client wait when it ends."""

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
from ramify.server.listening import (
    ACCEPTED_AT_ONCE,
    KERNEL_QUEUE,
    Gate,
    address_of,
    files_for_connections,
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


class Announcer:
    """What a server of one process tells in its log."""

    tells_throughput = True

    def loading(self, address: str) -> None:
        _log.info("Loading; %s answers 503 until then", address)

    def serving(self, names: str, address: str, seconds: float) -> None:
        _log.info("Serving %s at %s after %.1f s (Ctrl-C ends)", names, address, seconds)

    def ending(self, service: Service) -> None:
        if service.loss is None and service.num_prompts:  # a loss is raised in the end, and told by whoever catches it
            _log.info("Ending: %d prompts have up to %g s", service.num_prompts, service.config.grace_period)


def run_front(
    service: Service, load_models: LoadModels, listener: socket.socket, announcer: Announcer | None = None
) -> None:
    """Serves as `serve` promises, in this process and from this socket, which it closes."""
    # The process is ours: no second series beside every counter, and as many connections as the system allows.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    config, files = service.config, raise_file_limit()
    gate = Gate(room_for_connections(config, files), files_for_connections(files), service.limits)
    with logging_to_stderr(), asyncio.Runner() as runner, contextlib.closing(listener):
        ends = _Ends(runner.get_loop())
        steps = (config.grace_period + 2 * _LAST_SECONDS, ends.ask), (_LAST_SECONDS, ends.insist)
        with SignalWatch(steps):
            front = _Front(service, load_models, listener, ends, announcer or Announcer())
            is_loading = runner.run(front.serve(gate))
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


class _Front:
    def __init__(
        self,
        service: Service,
        load_models: LoadModels,
        listener: socket.socket,
        ends: _Ends,
        announcer: Announcer,
    ) -> None:
        self._service = service
        self._load_models = load_models
        self._listener = listener
        self._ends = ends
        self._announcer = announcer

    async def serve(self, gate: Gate) -> bool:
        """Returns whether a thread is still loading models, which nobody waits for."""
        service, ends, address = self._service, self._ends, address_of(self._listener)
        began = time.monotonic()
        asyncio.get_running_loop().set_exception_handler(gate.heard)
        server = _server_of(service, gate)
        self._announcer.loading(address)
        listening = asyncio.create_task(server.serve(sockets=[self._listener]))
        reporting: asyncio.Task[None] | None = None
        thread, loading = _in_daemon_thread(partial(self._load_models, service.say))
        try:
            models = await _unless(ends.soon, loading)
            if models is not None:
                service.open(models)
                _watch(service, ends)
                # Python's collector need not look through a loaded model again and again while tokens are drawn.
                gc.collect()
                gc.freeze()
                self._announcer.serving(", ".join(service.models), address, time.monotonic() - began)
                if service.config.log_interval and self._announcer.tells_throughput:
                    reporting = asyncio.create_task(log_throughput(service, service.config.log_interval))
                await ends.soon.wait()
            service.is_draining = True
            server.should_exit = True
            self._announcer.ending(service)
            await _drain(service, service.config.grace_period, ends.at_once)
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


def _server_of(service: Service, gate: Gate) -> _Uvicorn:
    return _Uvicorn(
        uvicorn.Config(
            app_of(service),
            http=protocol_behind(gate),  # on h11, which bounds the size of headers
            backlog=ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=service.config.max_header_bytes,
            ws="none",
            log_level="error",  # what clients do wrong they are told, and the log is not theirs to fill
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(service.config.grace_period + _LAST_SECONDS) + 1,
        )
    )


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
    """Lets requests end by themselves for a while, then aborts what is left, and refuses what is still prepared."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.num_prompts and not at_once.is_set():
                await asyncio.sleep(0.02)
    for model in service.models.values():
        model.engine.close_intake()
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
