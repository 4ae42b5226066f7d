"""The log of a server process: lines with their time on standard error, written by a thread of their own.

A terminal that is stopped, or a pipe that nobody reads, holds up that thread and not the event loop.
"""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener

_MOST_WAITING = 10_000  # lines; what comes while so many wait is dropped


class _Line(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {level}{record.message}"


class _DroppingHandler(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except queue.Full:
            return


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Shows what the package logs, from `info` on, while the block runs."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_WAITING)
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(_Line())
    listener = QueueListener(lines, writer)
    handler = _DroppingHandler(lines)
    root = logging.getLogger("ramify")
    before = root.level, root.propagate
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        root.propagate = before[1]
        listener.stop()
