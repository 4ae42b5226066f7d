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
from collections.abc import Callable

from ramify.drive.core_loop import Core, CoreLoop, fault_of
from ramify.drive.mailroom import Mailbox, Mailroom, RequestStream
from ramify.engine.observations import EngineState
from ramify.engine.request import Request
from ramify.errors import EngineBusyError, EngineClosedError, EngineFaultError, EngineLostError, RamifyError
from ramify.outputs import RequestOutput

_log = logging.getLogger(__name__)


class AsyncEngine(CoreLoop):
    """Drives a core from a thread of its own, for any number of event loops and requests."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.room = Mailroom(self._lock)
        self._accepts = True
        self._mourners: list[Callable[[EngineLostError], None]] = []
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

    async def state(self) -> EngineState:
        """All that metrics tell of it."""
        return EngineState(self.stats(), self.num_unfinished, self.observations)

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """Calls it, from another thread, if the engine's thread ends before it is asked to."""
        self._mourners.append(listener)

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
        await self.room.until_empty(grace_seconds)
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
            self._loop()
            for request_id in list(self.room.mailboxes):
                self._abort(request_id)
            # What came in just before the stop, and the core never saw.
            self.room.fail(list(self.room.mailboxes.values()), EngineClosedError("the engine has been shut down"))
        except BaseException as error:  # whatever it was, no reader may wait for a thread that is gone
            _log.exception("the engine thread ended")
            with self._lock:
                self._accepts = False
            self.room.fail(list(self.room.mailboxes.values()), fault_of(error))
            for mourner in self._mourners:
                mourner(EngineLostError(f"the engine's thread ended ({type(error).__name__})"))

    def _add(self, mailbox: Mailbox) -> None:
        try:
            self._core.add_request(mailbox.request)
            mailbox.is_known_to_core = True
        except RamifyError as error:
            self.room.fail([mailbox], error)

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        self.room.deliver(outputs)

    def _drop_known(self, failure: EngineFaultError) -> None:
        mailboxes = list(self.room.mailboxes.values())
        self.room.fail([mailbox for mailbox in mailboxes if mailbox.is_known_to_core], failure)
