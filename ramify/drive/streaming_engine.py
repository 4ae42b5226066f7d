"""StreamingEngine: requests in, streams of outputs out, from any thread and any number of event loops.

How requests are computed is each kind's own: by a thread (`AsyncEngine`), by another process (`RemoteEngine`), by
several (`ReplicaEngine`). How they are taken, refused, aborted and ended is the same for all, and stands here.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from ramify.drive.mailroom import Mailbox, Mailroom, RequestStream
from ramify.engine.observations import EngineState
from ramify.engine.request import Request
from ramify.errors import EngineClosedError, EngineLostError


class StreamingEngine(ABC):
    """Ends with the interpreter, if it was not stopped before."""

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self._lock = lock if lock is not None else threading.Lock()
        self.room = Mailroom(self._lock)
        self._accepts = True
        atexit.register(self.stop)

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted here and have not ended."""
        return len(self.room)

    @property
    @abstractmethod
    def is_sound(self) -> bool:
        """Whether it takes requests and its last step did not fail."""

    @abstractmethod
    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """Calls it, from another thread, if what computes ends before it is asked to."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache."""

    @abstractmethod
    async def state(self) -> EngineState:
        """All that metrics tell of it."""

    @abstractmethod
    def check_thread(self) -> None:
        """Raises EngineBusyError where waiting for the engine would be waiting for oneself."""

    def submit(self, request: Request) -> RequestStream:
        """Queues a request made by an intake; call it inside an event loop."""
        self.check_thread()
        with self._lock:
            if not self._accepts:
                raise EngineClosedError("the engine has been shut down")
            mailbox = self.room.open(request)
            try:
                self._enter(mailbox)
            except BaseException:
                del self.room.mailboxes[request.request_id]
                raise
        return RequestStream(self, mailbox)

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; its reader gets what there is, with finish_reason "abort"."""

    def abort_all(self) -> None:
        for request_id in list(self.room.mailboxes):
            self.abort(request_id)

    async def shutdown(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for the grace time, aborts the rest, ends what computes."""
        self.check_thread()
        self.close_intake()
        await self.room.until_empty(grace_seconds)
        await asyncio.to_thread(self.stop)

    def close_intake(self) -> None:
        """Refuses every new request with EngineClosedError from now on."""
        with self._lock:
            self._accepts = False

    def stop(self) -> None:
        """Aborts unfinished requests and ends what computes them; returns when that has ended."""
        self.close_intake()
        atexit.unregister(self.stop)
        self._end()

    @abstractmethod
    def _enter(self, mailbox: Mailbox) -> None:
        """Hands a request on to what computes it; the lock is held."""

    @abstractmethod
    def _end(self) -> None:
        """Ends what computes; no request comes any more."""
