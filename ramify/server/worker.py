"""A worker: one of several processes that speak HTTP (`--http-workers`).

It listens at once, answers 503 until it has joined the engine's process, and then serves as a server of one process
does. It ends with its server: when that tells it to, by SIGTERM, and when that is gone.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from ramify.errors import RamifyError
from ramify.remote.start import join, wanted_of
from ramify.server.config import ServerConfig
from ramify.server.front import Announcer, run_front
from ramify.server.limits import Limits
from ramify.server.service import ServedModel, Service
from ramify.server.to_serve import ModelToServe, served
from ramify.server.worker_task import WITHOUT_ENGINE, Begin, Ready, Say, Task, send, told


class Voice(Announcer):
    """Tells the server, whose log it is; only the line on throughput, now and then, is the first worker's."""

    def __init__(self, control: socket.socket, number: int) -> None:
        self.tells_throughput = number == 0
        self._control = control

    def loading(self, address: str) -> None: ...

    def serving(self, _names: str, _address: str, _seconds: float) -> None:
        send(self._control, Ready())

    def ending(self, service: Service) -> None: ...


def work(control: socket.socket) -> None:
    messages = told(control)
    task, _ = next(messages, (None, None))
    if not isinstance(task, Task):
        os._exit(1)  # the server is gone already
    config = ServerConfig(**task.config)
    by_client = config.max_queue_per_client is not None
    limits = Limits(task.limits, by_client=by_client, num_processes=config.http_workers, column=task.number)
    service = Service(config, limits)
    begun: queue.SimpleQueue[tuple[Begin, int]] = queue.SimpleQueue()

    def listen() -> None:
        for message, file in messages:
            if isinstance(message, Say):
                service.note(message.text)
            elif isinstance(message, Begin) and file is not None:
                begun.put((message, file))
        os._exit(1)  # the server is gone, and the engine with it

    def load(_say: Callable[[str], None]) -> list[ServedModel]:
        return _joined(*begun.get())

    threading.Thread(target=listen, name="ramify-server", daemon=True).start()
    try:
        run_front(service, load, socket.socket(fileno=task.listener), Voice(control, task.number))
    except RamifyError:
        os._exit(WITHOUT_ENGINE)  # the server notices too, and says so once


def _joined(begin: Begin, file: int) -> list[ServedModel]:
    models = [ModelToServe(model.name, model.build, model.mixed) for model in begin.models]
    joined = join(socket.socket(fileno=file), [wanted_of(model.build, _hush) for model in models], _hush)
    ready = zip(served(models, joined), begin.models, strict=True)
    return [replace(model, created=same.created) for model, same in ready]


def _hush(_: str) -> None:
    """What loading tells is in the server's log already."""
