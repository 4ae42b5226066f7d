"""ReplicaEngine: what an AsyncEngine is to its callers, for several engines in processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Sequence

from ramify.drive.mailroom import Mailroom, RequestStream
from ramify.engine.capacity import Capacity
from ramify.engine.observations import EngineState
from ramify.engine.request import Request
from ramify.errors import EngineBusyError, EngineClosedError, EngineLostError, InvalidInputError, RamifyError
from ramify.remote.link import Link
from ramify.remote.packing import check_crosses
from ramify.replicas.pool import Pool
from ramify.replicas.replica_core import NO_PROCESSORS
from ramify.replicas.states import States
from ramify.text.codec import TextCodec


class ReplicaEngine:
    """One model of each of several processes. Any number of event loops and requests."""

    def __init__(self, links: Sequence[Link], model: int, codec: TextCodec, capacity: Capacity, *, seed: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self.room = Mailroom(self._lock)
        self.pool = Pool(links, model, codec, capacity, seed=seed, deliver=self.room.deliver, fail=self._fail)
        self._states = States(links, model)
        self._accepts = True
        atexit.register(self.stop)

    # -- for callers, from any thread ----------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted here and have not ended."""
        return len(self.room)

    @property
    def is_sound(self) -> bool:
        """Whether it takes requests, and the last step of some engine did not fail."""
        there = zip(self.pool.letters, self.pool.links, strict=True)
        return self._accepts and any(letters.is_sound and link.error is None for letters, link in there)

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """Calls it, from another thread, when the last engine's process has ended before it was asked to."""
        self.pool.when_lost(listener)

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that the engines cannot serve; asks nobody."""
        if request.request_id in self.room.mailboxes:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        check_crosses(request.sampling_params, NO_PROCESSORS)
        self.capacity.check(request)

    def stats(self) -> dict[str, int]:
        """Of all engines together."""
        return self._state().stats

    def replica_stats(self) -> list[dict[str, int]]:
        return self._state().replicas

    async def state(self) -> EngineState:
        """All that metrics tell."""
        return await asyncio.to_thread(self._state)

    def _state(self) -> EngineState:
        self.check_thread()
        return self._states.sum(self.pool.queue.num_waiting, self.num_unfinished)

    def submit(self, request: Request) -> RequestStream:
        """Queues a request made by an intake; call it inside an event loop."""
        self.check_thread()
        check_crosses(request.sampling_params, NO_PROCESSORS)
        with self._lock:
            if not self._accepts:
                raise EngineClosedError("the engine has been shut down")
            mailbox = self.room.open(request)
            self.pool.submit([request])
        return RequestStream(self, mailbox)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; its reader gets what there is, with finish_reason "abort"."""
        if request_id in self.room.mailboxes:
            self.pool.abort(request_id)

    def abort_all(self) -> None:
        for request_id in list(self.room.mailboxes):
            self.abort(request_id)

    async def shutdown(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for the grace time, aborts the rest, ends the processes."""
        self.check_thread()
        self.close_intake()
        await self.room.until_empty(grace_seconds)
        await asyncio.to_thread(self.stop)

    def close_intake(self) -> None:
        """Refuses every new request with EngineClosedError from now on."""
        with self._lock:
            self._accepts = False

    def stop(self) -> None:
        """Aborts unfinished requests and ends the engines' processes; returns when they have ended."""
        self.close_intake()
        atexit.unregister(self.stop)
        self.pool.stop()

    def check_thread(self) -> None:
        if self.pool.is_own_thread:
            raise EngineBusyError(
                "the threads that read the engines' outputs cannot wait for them: score functions must not call the "
                "engine whose outputs they rank (a second engine may be called)"
            )

    def _fail(self, request: Request, error: RamifyError) -> None:
        mailbox = self.room.mailboxes.get(request.request_id)
        if mailbox is not None:
            self.room.fail([mailbox], error)
