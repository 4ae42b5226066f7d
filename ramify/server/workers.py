"""Workers: several processes that speak HTTP, behind one port and before one engine (`--http-workers`).

                     +- worker 0 -+
    clients -- port -+- worker 1 -+- the engine's process
                     +- ...      -+

This process binds the port, starts all others and watches over them; it serves nobody itself. Workers accept from the
one listening socket, and count prompts and connections in memory that they share (`limits.py`). One that ends by itself
is replaced: its clients lose their connections, the engine drops what they asked for, nobody else notices. Where the
engine ends, everything does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import EngineLostError, InvalidInputError, RamifyError
from ramify.process.search_path import told_search_path
from ramify.remote.engine_process import EngineProcess
from ramify.remote.frames import frame_of
from ramify.remote.link import Link
from ramify.server.config import ServerConfig
from ramify.server.limits import Limits
from ramify.server.listening import address_of, listener_of, raise_file_limit, room_for_connections
from ramify.server.logs import logging_to_stderr
from ramify.server.service import limits_of
from ramify.server.signals import SignalWatch
from ramify.server.to_serve import ModelToServe
from ramify.server.worker_task import WITHOUT_ENGINE, Begin, Model, Say, Task, send, wait_ready

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("worker_program.py")
_LAST_SECONDS = 15.0  # for workers, beyond the grace period, until they are ended as they are
_MOST_ENDS, _ENDS_SECONDS = 5, 60.0  # workers that may end by themselves within so many seconds


class Worker:
    """A worker as its server sees it. `ready` and `ended` are called from a thread of its own."""

    def __init__(
        self,
        task: Task,
        folder: str,
        *,
        ready: Callable[[Worker], None],
        ended: Callable[[Worker, int], None],
    ) -> None:
        self.number = task.number
        self._ready, self._ended = ready, ended
        self._lock = threading.Lock()
        self.control, theirs = socket.socketpair()
        with theirs:
            # In a process group of its own: Ctrl-C in a terminal is for the server alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), task.listener, task.limits),
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},  # by which the library sums over processes
                process_group=0,
            )
        with contextlib.suppress(OSError):  # it has ended already, which the thread notices
            self.control.sendall(frame_of(told_search_path()))
        self._send(task)
        threading.Thread(target=self._watch, name=f"ramify-worker-{self.number}", daemon=True).start()

    def say(self, text: str) -> None:
        self._send(Say(text))

    def begin(self, models: Sequence[Model], engine: socket.socket) -> None:
        """Tells it what to serve and by which connection, which is its own from now on."""
        with engine:
            self._send(Begin(list(models)), engine.fileno())

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _send(self, message: Task | Say | Begin, file: int | None = None) -> None:
        with self._lock, contextlib.suppress(OSError):
            send(self.control, message, file)

    def _watch(self) -> None:
        if wait_ready(self.control):
            self._ready(self)
        self._ended(self, self._process.wait())


class _Silence:
    """Receives what the engine's process tells to everybody; requests are the workers'."""

    def receive(self, message: Any) -> None: ...

    def lose(self, error: EngineLostError) -> None: ...


def serve_by_workers(config: ServerConfig, models: Callable[[], Sequence[ModelToServe]]) -> None:
    """As `serve`: listens at once, returns when SIGTERM or Ctrl-C has ended it, raises what ended it otherwise."""
    room_for_connections(config, raise_file_limit())  # a mistake shows before anything is started
    limits = limits_of(config, config.http_workers)
    with (
        logging_to_stderr(),
        tempfile.TemporaryDirectory(prefix="ramify-metrics-") as folder,
        contextlib.closing(listener_of(config)) as listener,
    ):
        Workers(config, models, listener, limits, folder).run()


class Workers:
    """Everything happens in the thread of `run`, told by others through a queue."""

    def __init__(
        self,
        config: ServerConfig,
        models: Callable[[], Sequence[ModelToServe]],
        listener: socket.socket,
        limits: Limits,
        folder: str,
    ) -> None:
        self._config = config
        self._models = models
        self._listener = listener
        self._limits = limits
        self._folder = folder
        self._began = time.monotonic()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: dict[int, Worker] = {}
        self._told: list[Model] | None = None  # what is served, once the engine's process has begun
        self._num_ready = 0
        self._ends: deque[float] = deque()  # when workers ended by themselves
        self._process: EngineProcess | None = None
        self._link: Link | None = None
        self._is_ending = False
        self._deadline = 0.0  # for workers, once it is ending
        self._failure: BaseException | None = None

    def run(self) -> None:
        steps = (
            (self._config.grace_period + _LAST_SECONDS, lambda: self._inbox.put(self._end)),
            (_LAST_SECONDS, lambda: self._inbox.put(self._end)),
        )
        _log.info("Loading; %s answers 503 until then", address_of(self._listener))
        with SignalWatch(steps):
            try:
                for number in range(self._config.http_workers):
                    self._start(number)
                threading.Thread(target=self._load, name="ramify-load", daemon=True).start()
                while self._workers or not self._is_ending:
                    self._act()
            finally:
                for worker in self._workers.values():
                    worker.signal(signal.SIGKILL)
                if self._link is not None:
                    self._link.close()  # which ends the engine's process
                elif self._process is not None:
                    self._process.stop()
        if self._failure is not None:
            raise self._failure

    def _act(self) -> None:
        """Does what comes next; what workers do not do in time is not waited for."""
        try:
            act = self._inbox.get(timeout=self._patience)
        except queue.Empty:
            _log.error("%d HTTP processes did not end in time", len(self._workers))
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
            self._deadline = float("inf")  # nothing outlives that signal
            return
        act()

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for the next act; None: for ever."""
        if not self._is_ending or self._deadline == float("inf"):
            return None
        return max(0.0, self._deadline - time.monotonic())

    # -- loading, in a thread of its own ------------------------------------------------------------------------------

    def _load(self) -> None:
        process: EngineProcess | None = None
        try:
            process = EngineProcess()

            from ramify.remote.start import wanted_of  # brings torch, as that process does meanwhile

            models = self._models()
            if models[0].config.model_config.data_parallel_size > 1:
                raise InvalidInputError(
                    "http_workers must be 1 with data_parallel_size above 1: one process has the queue that all "
                    "replicas draw from"
                )
            process.build([wanted_of(model.build, self._say).build for model in models])
            link = Link(process.connect(), process)  # the first one, which is told what loading says
            self._inbox.put(lambda: self._begin(process, models))
            facts = link.wait_ready(self._say)
            link.when_lost(self._lose)
            link.start([_Silence() for _ in facts])
            self._inbox.put(lambda: self._keep(link))
        except BaseException as error:  # raised by `run`
            failure = error
            if process is not None:
                process.stop()
            self._inbox.put(lambda: self._fail(failure))

    def _say(self, text: str) -> None:
        _log.info("%s", text)
        self._inbox.put(lambda: self._pass_on(text))

    def _lose(self, error: EngineLostError) -> None:
        self._inbox.put(lambda: self._fail(error))

    # -- acts ---------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        task = Task.of(self._config, number, listener=self._listener.fileno(), limits=self._limits.file)
        self._workers[number] = Worker(
            task,
            self._folder,
            ready=lambda worker: self._inbox.put(lambda: self._greet(worker)),
            ended=lambda worker, status: self._inbox.put(lambda: self._mourn(worker, status)),
        )
        self._tell(self._workers[number])

    def _tell(self, worker: Worker) -> None:
        if self._told is not None and self._process is not None:
            try:
                worker.begin(self._told, self._process.connect())
            except EngineLostError as error:
                self._fail(error)

    def _begin(self, process: EngineProcess, models: Sequence[ModelToServe]) -> None:
        self._process = process
        now = int(time.time())
        self._told = [Model(model.name, model.build, model.mixed, now) for model in models]
        for worker in self._workers.values():
            self._tell(worker)

    def _pass_on(self, text: str) -> None:
        for worker in self._workers.values():
            worker.say(text)

    def _keep(self, link: Link) -> None:
        self._link = link

    def _greet(self, worker: Worker) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        self._num_ready += 1
        if self._num_ready == self._config.http_workers:
            names, seconds = ", ".join(model.name for model in self._told or ()), time.monotonic() - self._began
            where, count = address_of(self._listener), self._config.http_workers
            _log.info("Serving %s at %s by %d processes after %.1f s (Ctrl-C ends)", names, where, count, seconds)

    def _mourn(self, worker: Worker, status: int) -> None:
        """A worker has ended: as it was told to, or another takes its place."""
        del self._workers[worker.number]
        self._limits.give_back_all(worker.number)
        if self._is_ending:
            return
        if status == WITHOUT_ENGINE:
            return  # this process notices too, and knows more
        now = time.monotonic()
        self._ends.append(now)
        while now - self._ends[0] > _ENDS_SECONDS:
            self._ends.popleft()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        if len(self._ends) > _MOST_ENDS:
            self._fail(
                RamifyError(f"an HTTP process ended {how}, as {_MOST_ENDS} others did within {_ENDS_SECONDS:g} s")
            )
            return
        _log.error("HTTP process %d ended %s, and its connections with it: another takes its place", worker.number, how)
        self._start(worker.number)

    def _end(self) -> None:
        """Workers stop as servers do at this signal: gently at the first, at once at the second."""
        if not self._is_ending:
            self._is_ending = True
            self._deadline = time.monotonic() + self._config.grace_period + _LAST_SECONDS
            self._listener.close()  # workers close theirs: nobody may wait for a server that is leaving
            held = self._limits.num_prompts
            if held and self._failure is None:
                _log.info("Ending: %d prompts have up to %g s", held, self._config.grace_period)
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)

    def _fail(self, error: BaseException) -> None:
        if self._is_ending:
            return
        self._failure = error
        self._end()
