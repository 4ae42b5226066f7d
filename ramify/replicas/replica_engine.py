"""ReplicaEngine: what an AsyncEngine is to its callers, for several engines in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ramify.drive.mailroom import Mailbox
from ramify.drive.streaming_engine import StreamingEngine
from ramify.engine.capacity import Capacity
from ramify.engine.observations import EngineState
from ramify.engine.request import Request
from ramify.errors import EngineBusyError, EngineLostError, InvalidInputError, RamifyError
from ramify.remote.link import Link
from ramify.remote.packing import check_crosses
from ramify.replicas.pool import Pool
from ramify.replicas.replica_core import NO_PROCESSORS
from ramify.replicas.states import States
from ramify.text.codec import TextCodec


class ReplicaEngine(StreamingEngine):
    """One model of each of several processes."""

    def __init__(self, links: Sequence[Link], model: int, codec: TextCodec, capacity: Capacity, *, seed: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.pool = Pool(links, model, codec, capacity, seed=seed, deliver=self.room.deliver, fail=self._fail)
        self._states = States(links, model)

    @property
    def is_sound(self) -> bool:
        """Whether it takes requests, and the last step of some engine did not fail."""
        there = zip(self.pool.letters, self.pool.links, strict=True)
        return self._accepts and any(letters.is_sound and link.error is None for letters, link in there)

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """When the last engine's process has ended before it was asked to."""
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
        return await asyncio.to_thread(self._state)

    def _state(self) -> EngineState:
        self.check_thread()
        return self._states.sum(self.pool.queue.num_waiting, self.num_unfinished)

    def abort(self, request_id: str) -> None:
        if request_id in self.room.mailboxes:
            self.pool.abort(request_id)

    def check_thread(self) -> None:
        if self.pool.is_own_thread:
            raise EngineBusyError(
                "the threads that read the engines' outputs cannot wait for them: score functions must not call the "
                "engine whose outputs they rank (a second engine may be called)"
            )

    def _enter(self, mailbox: Mailbox) -> None:
        check_crosses(mailbox.request.sampling_params, NO_PROCESSORS)
        self.pool.submit([mailbox.request])

    def _end(self) -> None:
        self.pool.stop()

    def _fail(self, request: Request, error: RamifyError) -> None:
        mailbox = self.room.mailboxes.get(request.request_id)
        if mailbox is not None:
            self.room.fail([mailbox], error)
