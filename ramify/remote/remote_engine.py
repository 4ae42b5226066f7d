"""RemoteEngine: what an AsyncEngine is to its callers, for a core that runs in another process.

event loop                            reader's thread of the link
  submit(request) ---- Add ----->
  abort(request_id) -- Abort --->
  RequestStream <--- mailroom ------    Told: tokens become outputs here (`remote/correspondence.py`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ramify.drive.mailroom import Mailbox
from ramify.drive.streaming_engine import StreamingEngine
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


class RemoteEngine(StreamingEngine):
    """One model of the engine's process, over one connection."""

    def __init__(self, link: Link, model: int, codec: TextCodec, capacity: Capacity) -> None:
        super().__init__()
        self._link = link
        self._model = model
        self.capacity = capacity
        self._letters = Correspondence(link, model, codec, deliver=self.room.deliver, fail=self._fail, lose=self._lost)
        self._last_state: EngineState | None = None

    # -- for callers, from any thread ----------------------------------------------------------------------------------

    @property
    def is_sound(self) -> bool:
        return self._accepts and self._letters.is_sound and self._link.error is None

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        self._link.when_lost(listener)

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that the engine cannot serve; asks nobody."""
        if request.request_id in self.room.mailboxes:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        check_crosses(request.sampling_params)
        self.capacity.check(request)

    def stats(self) -> dict[str, int]:
        """Once the engine is gone, the last that it told."""
        return self._ask().stats

    async def state(self) -> EngineState:
        """Of everybody's requests, over whichever connection they came."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> EngineState:
        self.check_thread()
        try:
            self._last_state = self._link.ask(self._model)
        except EngineLostError:
            if self._last_state is None:
                raise
        return self._last_state

    def abort(self, request_id: str) -> None:
        """Takes no lock, since Python may call it from a destructor at any moment."""
        self._letters.abort(request_id)

    def check_thread(self) -> None:
        if self._link.is_reader:
            raise EngineBusyError(
                "the thread that reads the engine's outputs cannot wait for them: score functions must not call the "
                "engine whose outputs they rank (a second engine may be called)"
            )

    def _enter(self, mailbox: Mailbox) -> None:
        check_crosses(mailbox.request.sampling_params)
        if self._link.error is not None:
            raise self._link.error
        self._letters.send(mailbox.request)

    def _end(self) -> None:
        self._link.close()  # ends the process if it is ours

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
