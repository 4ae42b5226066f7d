"""Ctrl-C while modules are imported: it ends the command at once. So does SIGTERM, where that is how a command ends.

An exception out of the blue is not safe in the middle of an import: packages swallow it where a module may be missing,
fail later over the half of one that is there, or abort in C++. Nothing of a command has begun by then that would want
an end of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130  # the exit status that shells give to Ctrl-C
_IMPORTING = "<frozen importlib._bootstrap>"  # where every import that runs a module's code has a frame


def end_at_once_while_importing() -> None:
    """From now on; elsewhere Ctrl-C stays the exception that it is. One that is ignored (a job of `nohup`) stays so."""
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may say who answers
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _answer)


def end_well_by_sigterm() -> None:
    """For a server, until it says itself how it ends: it has promised status 0, and there is nothing yet to wait for.

    As the first process of a container it would not even hear SIGTERM: there the system only delivers what is answered.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _answer(number: int, frame: FrameType | None) -> None:
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename == _IMPORTING:
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(INTERRUPTED)
        inner = inner.f_back
    signal.default_int_handler(number, frame)
