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

import logging
import threading
from collections.abc import Callable

from ramify.drive.core_loop import Core, CoreLoop, fault_of
from ramify.drive.mailroom import Mailbox
from ramify.drive.streaming_engine import StreamingEngine
from ramify.engine.observations import EngineState
from ramify.errors import EngineBusyError, EngineClosedError, EngineFaultError, EngineLostError, RamifyError
from ramify.outputs import RequestOutput

_log = logging.getLogger(__name__)


class AsyncEngine(StreamingEngine, CoreLoop):
    """Drives a core from a thread of its own."""

    def __init__(self, core: Core) -> None:
        CoreLoop.__init__(self, core)
        # A thread that computes while the interpreter shuts down may crash the process: it is stopped before.
        StreamingEngine.__init__(self, self._lock)
        self._mourners: list[Callable[[EngineLostError], None]] = []
        self._thread = threading.Thread(target=self._run, name="ramify-engine", daemon=True)
        self._thread.start()

    # -- for callers, from any thread ------------------------------------------------------------------------

    @property
    def is_sound(self) -> bool:
        return self._accepts and self._is_sound and self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        return CoreLoop.stats(self)

    async def state(self) -> EngineState:
        return EngineState(self.stats(), self.num_unfinished, self.observations)

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        self._mourners.append(listener)

    def abort(self, request_id: str) -> None:
        """Takes no lock, since Python may call it from a destructor at any moment. The engine thread need not be woken:
        while a request is unfinished, it looks into its inbox before every step.
        """
        if request_id in self.room.mailboxes:
            self._inbox.append(lambda: self._abort(request_id))

    def check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise EngineBusyError(
                "the engine thread cannot wait for itself: logits processors, score functions and observers must not "
                "call the engine they run in (a second engine may be called)"
            )

    def _enter(self, mailbox: Mailbox) -> None:
        self._inbox.append(lambda: self._add(mailbox))
        self._called.notify()

    def _end(self) -> None:
        with self._lock:
            self._stops = True
            self._called.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
            self.close_intake()
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
