"""Team: the ranks that follow, as the leading one sees them. No fork, no pickle: they are told what to load.

The leading rank is this process: it schedules, computes its own part and draws. All that ranks do together is done by
one thread here, in order, so that whatever breaks a call off (Ctrl-C in the middle of a step) leaves them in step. A
rank that is gone takes the engine with it: what it held cannot be had elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from ramify.device.sizing import GpuMemory
from ramify.errors import EngineLostError, ModelError, RamifyError
from ramify.parallel.group import Backend, ranks_on
from ramify.parallel.orders import Load, Measure, Order, Serve, line_of
from ramify.process.search_path import told_search_path

_PROGRAM = Path(__file__).with_name("child.py")
_SECONDS_TO_END = 10.0
Result = TypeVar("Result")


class Team:
    """Starts the other ranks at once; they load their parts while this one loads its own."""

    def __init__(
        self,
        models: Sequence[dict[str, Any]],
        devices: Sequence[torch.device],
        backend: Backend,
        *,
        uses_panels: bool,
    ) -> None:
        """Models as options of EngineConfig.from_options; the first device is the leading rank's."""
        self.backend, self.device, size = backend, devices[0], len(devices)
        if not sys.executable:
            raise RamifyError("tensor_parallel_size needs Python's own program to start ranks with, and there is none")
        folder = tempfile.TemporaryDirectory(prefix="ramify-ranks-")
        meeting_point = Path(folder.name) / "ranks"
        self._followers = [RankProcess(rank, size) for rank in range(1, size)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ramify-rank-0")
        self._end = weakref.finalize(self, _end, self._followers, self._thread, folder)
        self._lost: str | None = None
        for follower in self._followers:
            own = [options | {"device": str(devices[follower.rank])} for options in models]
            follower.tell(Load(own, follower.rank, size, str(meeting_point), backend, uses_panels))
        self._wait_for_answers()
        try:
            self.ranks = ranks_on(backend, meeting_point, 0, size)
        except RuntimeError as error:
            raise self._refusal(error) from None
        if backend == "nccl":  # a GPU would wait for ever for one that is gone
            for follower in self._followers:
                watch = (weakref.ref(self), follower)
                threading.Thread(target=_watch, args=watch, name="ramify-rank-watch", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return [follower.pid for follower in self._followers]

    def wait_until_loaded(self) -> None:
        self._wait_for_answers()

    def serve(self, order: Serve) -> None:
        for follower in self._followers:
            follower.tell(order)
        self._wait_for_answers()

    def memory(self) -> list[tuple[torch.device, GpuMemory]]:
        """What each of the others found of its GPU since it was told to serve, beside the leading rank's device."""
        for follower in self._followers:
            follower.tell(Measure())
        return [(self.device, GpuMemory(*answer["memory"])) for answer in self._wait_for_answers()]

    def check(self) -> None:
        """Raises if a rank is gone: what was computed since then means nothing."""
        if self._lost is not None:
            raise EngineLostError(self._lost)

    def lose(self) -> None:
        """A rank is gone while others may wait for it, on their GPUs."""
        if self._lost is None:
            self._loss(None)

    def together(self, order: Order | None, act: Callable[[], Result]) -> Result:
        """Tells the others what this rank does now, and does it."""
        self.check()

        def do() -> Result:
            if order is not None:
                line = line_of(order)
                for follower in self._followers:
                    follower.send(line)
            with torch.inference_mode():
                return act()

        future = self._thread.submit(do)
        try:
            wait([future])
        except BaseException:  # Ctrl-C: what all ranks have begun they end first, so that they stay together
            wait([future])
            raise
        error = future.exception()
        if error is not None:
            raise self._loss(error) from error
        return future.result()

    def close(self) -> None:
        """Ends the other ranks; what they were computing is lost."""
        self._lost = self._lost or "the ranks that share this engine's model were ended"
        self._end()

    def _loss(self, error: BaseException | None) -> EngineLostError:
        """What is said now and from now on."""
        why = self._reasons() or f"rank 0 of {len(self._followers) + 1}: {type(error).__name__}: {error}"
        self.ranks.abort()
        self._lost = f"the ranks that share this engine's model are no longer together: {why}; make a new engine"
        self._end()
        return EngineLostError(self._lost)

    def _reasons(self) -> str:
        """Why others ended. Whoever was ended is the cause; the rest only noticed."""
        reasons = [reason for follower in self._followers if (reason := follower.reason())]
        return "; ".join([reason for reason in reasons if "was ended by" in reason] or reasons)

    def _wait_for_answers(self) -> list[dict[str, Any]]:
        answers = [follower.answer() for follower in self._followers]
        if not all(answer.get("ready") is True for answer in answers):
            raise self._refusal(None)
        return answers

    def _refusal(self, error: Exception | None) -> ModelError:
        why = self._reasons() or str(error)
        self.close()
        return ModelError(f"not all ranks could be started: {why}")


class RankProcess:
    """One of the other ranks: its process and the socket to it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self._control, theirs = socket.socketpair()
        threads = max(1, torch.get_num_threads() // size)
        with theirs:
            # In a process group of its own: Ctrl-C in a terminal is for this process alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        self._answers = self._control.makefile("rb")
        self._said: str | None = None
        self.send(told_search_path() + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Until its process has ended."""
        self._process.wait()

    def tell(self, order: Order) -> None:
        self.send(line_of(order))

    def send(self, line: bytes) -> None:
        with suppress(OSError):  # it has ended, which the next thing computed together will notice
            self._control.sendall(line)

    def answer(self) -> dict[str, Any]:
        """Waits for it; an error, or the end of the process, is remembered."""
        try:
            told: dict[str, Any] = json.loads(self._answers.readline() or b"{}")
        except (OSError, ValueError):
            told = {}
        if "error" in told:
            self._said = str(told["error"])
        return told

    def reason(self) -> str | None:
        """Why it ended, or said that it could not go on; None while it runs."""
        name = f"rank {self.rank} of {self._size}"
        try:
            status = self._process.wait(_SECONDS_TO_END if self._said is not None else 1.0)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"{name} was ended by {_signal_name(-status)}"
        while self._said is None and self.answer():
            pass
        return f"{name}: {self._said}" if self._said is not None else f"{name} ended with status {status}"

    def stop(self) -> None:
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end(
    followers: Sequence[RankProcess], thread: ThreadPoolExecutor, folder: tempfile.TemporaryDirectory[str]
) -> None:
    for follower in followers:
        follower.stop()
    thread.shutdown(wait=False, cancel_futures=True)
    folder.cleanup()


def _watch(team: weakref.ref[Team], follower: RankProcess) -> None:
    """Until this rank has ended, or its team."""
    follower.wait()
    alive = team()
    if alive is not None:
        alive.lose()


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
