"""EngineProcess: the engine's process as its parent sees it. No fork, no pickle: it is told what to load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ramify.errors import EngineLostError, RamifyError
from ramify.process.search_path import told_search_path
from ramify.remote.frames import frame_of
from ramify.remote.messages import Build, OneModel, TwoModels, encode

_PROGRAM = Path(__file__).with_name("child.py")
_SECONDS_TO_END = 10.0
_GPU = Path("/dev/nvidiactl")  # there where the driver is; torch knows for certain, but takes its time


def started_early(wanted: bool | None) -> EngineProcess | None:
    """A process for engines, if there is to be one. Where nobody says, it is where a GPU seems to be."""
    return EngineProcess() if wanted or (wanted is None and _GPU.exists()) else None


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What a process may use of a CPU: so many threads, on these cores (none named: on any)."""

    threads: int
    cores: frozenset[int] = frozenset()


class EngineProcess:
    """Starts at once and imports what an engine needs, so that this process may import meanwhile what it needs itself;
    `build` says what to load. It ends when `stop` is called or this process ends.

    `connect` may be called at any time and as often as there are front processes: it returns the front's end of a new
    connection, whose `fileno()` may be handed to a child of this process too. `share` is what it may use of the CPU,
    where several processes divide it.
    """

    def __init__(self, share: CoreShare | None = None) -> None:
        if not sys.executable:
            raise RamifyError("an engine in a process of its own needs Python's own program, and this one has none")
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs, _signals_held():
            # In a process group of its own: Ctrl-C in a terminal is for this process alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env=None if share is None else {**os.environ, "OMP_NUM_THREADS": str(share.threads)},
            )
            if share is not None and share.cores:
                with suppress(OSError):  # what it may run on is the system's to say
                    os.sched_setaffinity(self._process.pid, share.cores)
        self._send(told_search_path())

    def build(self, models: Sequence[OneModel | TwoModels]) -> None:
        """What it is to load; to be said once, before anybody connects."""
        self._send(encode(Build(list(models))))

    def _send(self, content: bytes) -> None:
        with suppress(OSError):  # it has ended already, which whoever connects will notice
            self._control.sendall(frame_of(content))

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise EngineLostError(self.end()) from None
        return ours

    def end(self) -> str:
        """Waits for the end of a process that is ending, and says how it ended."""
        try:
            status = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "the engine's process closed its connection"
        if status < 0:
            return f"the engine's process was ended by {_signal_name(-status)}"
        return f"the engine's process ended with status {status}"

    def stop(self) -> None:
        """Ends it at once; what it was computing is lost."""
        with self._lock, suppress(OSError):
            self._control.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _signals_held() -> Iterator[None]:
    """A process that is started here holds back the signals that its parent answers until it can ignore them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
