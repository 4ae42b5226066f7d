"""`serve`: listens at once, loads the models meanwhile, and ends without leaving a client waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import uvicorn
from prometheus_client import disable_created_metrics

from ramify.errors import InvalidInputError
from ramify.server.app import app_of
from ramify.server.config import ServerConfig
from ramify.server.service import ServedModel, Service

T = TypeVar("T")
Say = Callable[[str], None]
LoadModels = Callable[[], Sequence[ServedModel]]
_LAST_SECONDS = 5.0  # after the aborts: for the last bytes on their way


class _Uvicorn(uvicorn.Server):
    """Without its own signal handlers: they raise the signal again, and a clean end would exit with status 143."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServerConfig, load_models: LoadModels, say: Say) -> None:
    """Listens at once and answers 503 until the models are loaded; returns when SIGTERM or Ctrl-C has ended it.

    After the signal no request is taken, running ones get the grace period, then they are ended with an error. A
    second signal ends them at once. What `load_models` raises is raised here.
    """
    # The process is ours: no second series beside every counter, and as many connections as the system allows.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    asyncio.run(_serve(config, load_models, say))


async def _serve(config: ServerConfig, load_models: LoadModels, say: Say) -> None:
    service = Service(config)
    listener = _listener(config)
    server = _Uvicorn(
        uvicorn.Config(
            app_of(service),
            http="h11",  # bounds the size of headers
            h11_max_incomplete_event_size=config.max_header_bytes,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(config.grace_period + _LAST_SECONDS) + 1,
        )
    )
    ending, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if ending.is_set() else ending).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    listening = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        models = await _unless(ending, _in_daemon_thread(load_models))
        if models is not None:
            service.open(models)
            # Python's collector need not look through a loaded model again and again while tokens are drawn.
            gc.collect()
            gc.freeze()
            say(f"Serving {', '.join(service.models)} at {_address(listener)} (Ctrl-C ends)")
            await ending.wait()
        service.is_draining = True
        server.should_exit = True
        if service.num_unfinished:
            say(f"Ending: {service.num_unfinished} prompts have up to {config.grace_period:g} s")
        await _drain(service, config.grace_period, at_once)
    finally:
        server.should_exit = True
        await listening
        for model in service.models.values():
            await asyncio.to_thread(model.engine.stop)


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


def _in_daemon_thread(load: LoadModels) -> asyncio.Future[Sequence[ServedModel]]:
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
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, models, error)

    threading.Thread(target=run, name="ramify-load", daemon=True).start()
    return loaded


def _listener(config: ServerConfig) -> socket.socket:
    """A bound socket, or an error that names the address."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InvalidInputError(f"cannot listen at {config.host} port {config.port}: {error.strerror}") from None
    return listener


def _address(listener: socket.socket) -> str:
    """Where it really listens: port 0 became another one."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
