"""BoundedProcess: work of which nobody knows what it costs, in a process that ends when it takes too much."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ramify.process.bounded_child import LENGTH, read_frame

_PROGRAM = Path(__file__).with_name("bounded_child.py")
_Process = subprocess.Popen[bytes]


class OutOfTimeError(Exception):
    """The process took more of the processor's time than it may."""


class OutOfMemoryError(Exception):
    """It took more memory than it may, or ended by itself."""


class FailedError(Exception):
    """The worker raised an exception, whose message this is."""


class BoundedProcess:
    """Started with the first request, and again after one that it did not survive. Several threads may ask at once.

    `worker` is the file of a module that `bounded_child` can run. Seconds are those of the processor's time for a short
    request; a long one gets a second more for each `bytes_per_second`.
    """

    def __init__(
        self,
        worker: Path,
        first: bytes,
        *,
        seconds: int,
        memory_bytes: int,
        bytes_per_second: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._first = first
        self._arguments = [str(worker), str(memory_bytes), str(seconds), str(bytes_per_second)]
        self._environment = dict(environment or {})
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def ask(self, request: bytes) -> bytes:
        with self._lock:
            try:
                process = self._process = self._process or self._start()
                reply = _ask(process, request)
            except BaseException:  # also an interrupt: the reply to this request must not become that to the next
                self.close()
                raise
            if reply is None:
                self._process = None
                _end(process)
                raise OutOfTimeError if process.returncode == -signal.SIGPROF else OutOfMemoryError
        if reply[0]:
            raise FailedError(reply[1:].decode(errors="replace"))
        return reply[1:]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _start(self) -> _Process:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._environment},
        )
        weakref.finalize(self, _end, process)
        _send(process, self._first)
        return process


def _send(process: _Process, content: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which reading will tell
        process.stdin.write(LENGTH.pack(len(content)))
        process.stdin.write(content)
        process.stdin.flush()


def _ask(process: _Process, request: bytes) -> bytes | None:
    """None if the process has ended."""
    assert process.stdout is not None
    _send(process, request)
    return read_frame(process.stdout)


def _end(process: _Process) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
