"""CoreLoop: a core stepped by one thread, between whose steps acts of other threads come in through an inbox.

What becomes of requests is told by methods that each kind of loop has of its own: `AsyncEngine` puts outputs into
mailboxes, an engine in a process of its own writes them to its connections.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ramify.engine.metrics import IterationStats
from ramify.engine.observations import Observations
from ramify.engine.request import Request
from ramify.errors import EngineFaultError, EngineLostError
from ramify.outputs import RequestOutput

_log = logging.getLogger(__name__)


class Core(Protocol):
    """What the engine thread drives: an EngineCore, or a stand-in for one."""

    @property
    def last_step(self) -> IterationStats: ...

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> RequestOutput | None: ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> dict[str, int]: ...


class Observer(Protocol):
    """Is called in the engine thread after each step and each finished request, so it must be quick."""

    def stepped(self, step: IterationStats) -> None: ...

    def ended(self, output: RequestOutput) -> None: ...


class CoreLoop(ABC):
    """After the start only the thread that runs it changes the core; `check` and `stats` may read it from others."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self.observations = Observations()
        self._observers: list[Observer] = [self.observations]
        self._stops = False
        self._is_sound = True  # whether the last step did not fail

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache."""
        return self._core.stats()

    @abstractmethod
    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        """What a step gave; there may be none."""

    @abstractmethod
    def _drop_known(self, failure: EngineFaultError) -> None:
        """A step failed: every request that the core knew has ended."""

    def _turn(self) -> None:  # noqa: B027 - most kinds have nothing to do then
        """Is called when the inbox is empty, before the loop steps or waits."""

    def _loop(self) -> None:
        """Until it is told to stop."""
        while self._do_inbox():
            self._step()

    def _do_inbox(self) -> bool:
        """Does what was asked since the last step and waits until there is work; returns whether to go on."""
        while True:
            while self._inbox:
                self._inbox.popleft()()
            self._turn()
            if self._stops:
                return False
            if self._core.has_unfinished():
                return True
            with self._lock:
                if not self._inbox and not self._stops:
                    self._called.wait()

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except Exception as error:  # the core has ended all its requests and can go on with new ones
            _log.exception("a step failed")
            self._is_sound = False
            self._drop_known(fault_of(error))
            return
        self._is_sound = True
        for observer in self._observers:
            observer.stepped(self._core.last_step)
        self._deliver(outputs)

    def _abort(self, request_id: str) -> None:
        output = self._core.abort(request_id)
        if output is not None:
            self.observations.finished(self._core.last_step.finished_requests[-1:])  # after that step was observed
            self._deliver([output])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self._hand_out(outputs)
        for output in outputs:
            if output.finished:
                for observer in self._observers:
                    observer.ended(output)


def fault_of(error: BaseException) -> EngineFaultError:
    if isinstance(error, EngineLostError):
        return error
    # Only the kind of error: its message may hold what a remote client should not read.
    return EngineFaultError(f"the engine failed in a step ({type(error).__name__})")
