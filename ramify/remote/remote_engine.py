"""RemoteEngine: what an AsyncEngine is to its callers, for a core that runs in another process.

event loop                            reader's thread of the link
  submit(request) ---- Add ----->
  abort(request_id) -- Abort --->
  RequestStream <--- mailroom ------    Told: tokens become outputs here (`remote/correspondence.py`)
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable

from ramify.drive.mailroom import Mailroom, RequestStream
from ramify.engine.capacity import Capacity
from ramify.engine.observations import EngineState
from ramify.engine.request import Request
from ramify.errors import EngineBusyError, EngineClosedError, EngineLostError, InvalidInputError, RamifyError
from ramify.remote.assembly import Assembly
from ramify.remote.correspondence import Correspondence
from ramify.remote.link import Link
from ramify.remote.messages import Failed, Soundness, Told
from ramify.remote.packing import check_crosses
from ramify.text.codec import TextCodec


class RemoteEngine:
    """One model of the engine's process, over one connection. Any number of event loops and requests."""

    def __init__(self, link: Link, model: int, codec: TextCodec, capacity: Capacity) -> None:
        self._link = link
        self._model = model
        self.capacity = capacity
        self._lock = threading.Lock()
        self.room = Mailroom(self._lock)
        self._letters = Correspondence(link, model, codec, deliver=self.room.deliver, fail=self._fail, lose=self._lost)
        self._accepts = True
        self._last_state: EngineState | None = None
        atexit.register(self.stop)

    # -- for callers, from any thread ----------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted here and have not ended."""
        return len(self.room)

    @property
    def is_sound(self) -> bool:
        """Whether it takes requests and its last step did not fail."""
        return self._accepts and self._letters.is_sound and self._link.error is None

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """Calls it, from another thread, if the engine's process ends before it is asked to."""
        self._link.when_lost(listener)

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that the engine cannot serve; asks nobody."""
        if request.request_id in self.room.mailboxes:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        check_crosses(request.sampling_params)
        self.capacity.check(request)

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of queue and cache; once the engine is gone, the last that it told."""
        return self._ask().stats

    async def state(self) -> EngineState:
        """All that metrics tell of the engine, of everybody's requests."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> EngineState:
        self.check_thread()
        try:
            self._last_state = self._link.ask(self._model)
        except EngineLostError:
            if self._last_state is None:
                raise
        return self._last_state

    def submit(self, request: Request) -> RequestStream:
        """Queues a request made by an intake; call it inside an event loop."""
        self.check_thread()
        check_crosses(request.sampling_params)
        with self._lock:
            if self._link.error is not None and self._accepts:
                raise self._link.error
            if not self._accepts:
                raise EngineClosedError("the engine has been shut down")
            mailbox = self.room.open(request)
            try:
                self._letters.send(request)
            except BaseException:
                del self.room.mailboxes[request.request_id]
                raise
        return RequestStream(self, mailbox)

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; its reader gets what there is, with finish_reason "abort".

        Takes no lock, since Python may call it from a destructor at any moment.
        """
        self._letters.abort(request_id)

    def abort_all(self) -> None:
        for request_id in list(self.room.mailboxes):
            self.abort(request_id)

    async def shutdown(self, grace_seconds: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for the grace time, aborts the rest, ends the process."""
        self.check_thread()
        self.close_intake()
        await self.room.until_empty(grace_seconds)
        await asyncio.to_thread(self.stop)

    def close_intake(self) -> None:
        """Refuses every new request with EngineClosedError from now on."""
        with self._lock:
            self._accepts = False

    def stop(self) -> None:
        """Aborts unfinished requests and ends the engine's process, if it is ours; returns when it has ended."""
        self.close_intake()
        atexit.unregister(self.stop)
        self._link.close()

    def check_thread(self) -> None:
        if self._link.is_reader:
            raise EngineBusyError(
                "the thread that reads the engine's outputs cannot wait for them: score functions must not call the "
                "engine whose outputs they rank (a second engine may be called)"
            )

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def receive(self, message: Told | Failed | Soundness) -> None:
        self._letters.receive(message)

    def lose(self, error: EngineLostError) -> None:
        with self._lock:  # who submits holds it, and has either seen the loss or is among these
            pass
        self._letters.lose(error)

    def _lost(self, assemblies: list[Assembly], error: EngineLostError) -> None:
        self._fail(assemblies, error if self._accepts else EngineClosedError("the engine has been shut down"))

    def _fail(self, assemblies: list[Assembly], error: RamifyError) -> None:
        self.room.fail([self.room.mailboxes[assembly.request.request_id] for assembly in assemblies], error)
