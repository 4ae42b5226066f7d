"""SignalWatch: SIGTERM and Ctrl-C, heard by a thread of their own: they end the process whatever else it does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

ENDING = (signal.SIGTERM, signal.SIGINT)


class SignalWatch:
    """While its block runs, the nth signal calls the nth of `steps` and gives the process that step's time to end.

    A step is (seconds, what to call). When the seconds are over and the block still runs, or when a signal comes after
    the last step, the process ends at once with status 1. The calls happen in the watch's own thread: the system
    writes each signal to a socket, which needs no turn of the event loop. Enter it in the main thread.
    """

    def __init__(self, steps: Sequence[tuple[float, Callable[[], None]]]) -> None:
        self._steps = list(steps)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> Self:
        # Python's own handlers do nothing: with them in place, the system's handler writes to the socket.
        self._before = [(number, signal.signal(number, _nothing)) for number in ENDING]
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="ramify-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before:
            signal.signal(number, handler)
        self._writer.close()  # which ends the thread

    def _listen(self) -> None:
        steps, deadline = iter(self._steps), float("inf")
        with self._reader:
            while True:
                left = deadline - time.monotonic()
                ready, _, _ = select.select([self._reader], [], [], None if left == float("inf") else max(0.0, left))
                if not ready:
                    _leave("did not end in time")
                numbers = self._reader.recv(1)
                if not numbers:
                    return
                if numbers[0] not in ENDING:
                    continue
                seconds, call = next(steps, (None, None))
                if seconds is None or call is None:
                    _leave("ended at once, as asked")
                    continue
                deadline = time.monotonic() + seconds
                with contextlib.suppress(RuntimeError):  # the event loop that it calls is closed already
                    call()


def _nothing(_number: int, _frame: FrameType | None) -> None: ...


def _leave(why: str) -> None:
    """Without cleaning up: whatever keeps the process would keep that too."""
    with contextlib.suppress(OSError):
        os.write(2, f"ramify: {why}\n".encode())
    os._exit(1)
