"""AsyncEngine: an engine core stepped by one thread, its outputs as asynchronous streams.

    event loop                            engine thread
      submit(request) ---- inbox ------->   add_request
      abort(request_id) -- inbox ------->   abort
                                            step, as long as anything is unfinished
      RequestStream <--- mailbox --------   outputs of the step

After the start only the engine thread changes the core; `check` and `stats` may read it from others. Readers fetch
from the mailroom (`drive/mailroom.py`) when they like, and cost the engine neither time nor much memory.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ramify.drive.mailroom import Mailbox, Mailroom, RequestStream
from ramify.engine.metrics import IterationStats
from ramify.engine.request import Request
from ramify.errors import EngineBusyError, EngineClosedError, EngineFaultError, RamifyError
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


class AsyncEngine:
    """Drives a core from a thread of its own, for any number of event loops and requests."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self.room = Mailroom(self._lock)
        self._observers: list[Observer] = []
        self._accepts = True
        self._stops = False
        self._is_sound = True
        self._thread = threading.Thread(target=self._run, name="ramify-engine", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that computes while the interpreter shuts down may crash the process

    # -- for callers, from any thread ------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self.room)

    @property
    def is_sound(self) -> bool:
        """Whether it takes requests and its last step did not fail."""
        return self._accepts and self._is_sound and self._thread.is_alive()

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache."""
        return self._core.stats()

    def submit(self, request: Request) -> RequestStream:
        """Queues a request made by an intake; call it inside an event loop."""
        self.check_thread()
        with self._lock:
            if not self._accepts:
                raise EngineClosedError("the engine has been shut down")
            mailbox = self.room.open(request)
            self._inbox.append(lambda: self._add(mailbox))
            self._called.notify()
        return RequestStream(self, mailbox)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; its reader gets what there is, with finish_reason "abort".

        Takes no lock, since Python may call it from a destructor at any moment. The engine thread need not be woken:
        while a request is unfinished, it looks into its inbox before every step.
        """
        if request_id in self.room.mailboxes:
            self._inbox.append(lambda: self._abort(request_id))

    def abort_all(self) -> None:
        for request_id in list(self.room.mailboxes):
            self.abort(request_id)

    async def shutdown(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for the grace time, aborts the rest, ends the thread."""
        self.check_thread()
        self.close_intake()
        deadline = asyncio.get_running_loop().time() + grace_seconds
        while self.room.mailboxes and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.stop)

    def close_intake(self) -> None:
        """Refuses every new request with EngineClosedError from now on."""
        with self._lock:
            self._accepts = False

    def stop(self) -> None:
        """Aborts unfinished requests and ends the thread; returns when it has ended."""
        with self._lock:
            self._accepts, self._stops = False, True
            self._called.notify()
        atexit.unregister(self.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise EngineBusyError(
                "the engine thread cannot wait for itself: logits processors, score functions and observers must not "
                "call the engine they run in (a second engine may be called)"
            )

    # -- the engine thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._do_inbox():
                self._step()
            for request_id in list(self.room.mailboxes):
                self._abort(request_id)
            # What came in just before the stop, and the core never saw.
            self.room.fail(list(self.room.mailboxes.values()), EngineClosedError("the engine has been shut down"))
        except BaseException as error:  # whatever it was, no reader may wait for a thread that is gone
            _log.exception("the engine thread ended")
            with self._lock:
                self._accepts = False
            self.room.fail(list(self.room.mailboxes.values()), _fault(error))

    def _do_inbox(self) -> bool:
        """Does what was asked since the last step and waits until there is work; returns whether to go on."""
        while True:
            while self._inbox:
                self._inbox.popleft()()
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
            mailboxes = list(self.room.mailboxes.values())
            self.room.fail([mailbox for mailbox in mailboxes if mailbox.is_known_to_core], _fault(error))
            return
        self._is_sound = True
        for observer in self._observers:
            observer.stepped(self._core.last_step)
        self._deliver(outputs)

    def _add(self, mailbox: Mailbox) -> None:
        try:
            self._core.add_request(mailbox.request)
            mailbox.is_known_to_core = True
        except RamifyError as error:
            self.room.fail([mailbox], error)

    def _abort(self, request_id: str) -> None:
        output = self._core.abort(request_id)
        if output is not None:
            self._deliver([output])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self.room.deliver(outputs)
        for output in outputs:
            if output.finished:
                for observer in self._observers:
                    observer.ended(output)


def _fault(error: BaseException) -> EngineFaultError:
    # Only the kind of error: its message may hold what a remote client should not read.
    return EngineFaultError(f"the engine failed in a step ({type(error).__name__})")
