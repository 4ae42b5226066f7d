"""Mailroom: outputs on their way from an engine to their readers, each of whom sits in some event loop.

    engine: deliver(outputs of a step) --> mailboxes --> one call into each event loop --> readers

A mailbox keeps outputs as they came, and its reader says what becomes of several: `__anext__` joins what waits into
one output, `take` hands them out one by one or joined. More than MOST_WAITING are joined in any case, so that a reader
who never comes costs little memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from ramify.drive.merging import merged
from ramify.engine.request import Request
from ramify.errors import InvalidInputError, RamifyError
from ramify.outputs import RequestOutput
from ramify.sampling_params import OutputKind

MOST_WAITING = 256


class Mailbox:
    """What a reader has not fetched yet, and the reason why no more will come, if there is one.

    Written under the room's lock; `wake` runs in the reader's event loop.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.arrived = asyncio.Event()
        self.listener: Callable[[], None] | None = None
        self.outputs: list[RequestOutput] = []
        self.failure: RamifyError | None = None
        self.is_known_to_core = False
        # Otherwise each output holds everything, and the later one replaces the earlier.
        self._is_of_news = request.sampling_params.output_kind in (OutputKind.DELTA, OutputKind.GROWTH)

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if len(self.outputs) > (MOST_WAITING if self._is_of_news else 1):
            self.outputs = [self.joined(self.outputs)]

    def fail(self, failure: RamifyError) -> None:
        self.outputs, self.failure = [], failure

    def joined(self, outputs: Iterable[RequestOutput]) -> RequestOutput:
        """Several outputs as one; there must be one at least."""
        kind, whole = self.request.sampling_params.output_kind, None
        for output in outputs:
            whole = merged(whole, output, kind)
        assert whole is not None
        return whole

    def wake(self) -> None:
        self.arrived.set()
        if self.listener is not None:
            self.listener()


class Mailroom:
    """The mailboxes of all requests that have not ended, by their ids. `deliver` and `fail` may be called from any
    thread; `lock` guards everything, and may be shared with the engine's own state."""

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self.lock = lock if lock is not None else threading.Lock()
        self.mailboxes: dict[str, Mailbox] = {}
        self._awakened: dict[asyncio.AbstractEventLoop, dict[Mailbox, None]] = {}  # as a set that keeps its order

    def __len__(self) -> int:
        return len(self.mailboxes)

    def open(self, request: Request) -> Mailbox:
        """Call it with the lock held."""
        if request.request_id in self.mailboxes:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        mailbox = self.mailboxes[request.request_id] = Mailbox(request)
        return mailbox

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        with self.lock:
            for output in outputs:
                mailbox = self.mailboxes[output.request_id]
                if output.finished:
                    del self.mailboxes[output.request_id]
                mailbox.put(output)
                self._awaken(mailbox)

    def fail(self, mailboxes: Iterable[Mailbox], failure: RamifyError) -> None:
        """Nothing more will come; what waited is dropped."""
        with self.lock:
            for mailbox in mailboxes:
                del self.mailboxes[mailbox.request.request_id]
                mailbox.fail(failure)
                self._awaken(mailbox)

    def take(self, mailbox: Mailbox) -> list[RequestOutput]:
        """What waits in the mailbox, as it came; raises what ended the request if nothing will come any more."""
        with self.lock:
            mailbox.arrived.clear()
            outputs, mailbox.outputs = mailbox.outputs, []
            if not outputs and mailbox.failure is not None:
                raise mailbox.failure
            return outputs

    async def fetch(self, mailbox: Mailbox) -> RequestOutput:
        """Waits until something is in the mailbox, and joins what is."""
        while True:
            outputs = self.take(mailbox)
            if outputs:
                return mailbox.joined(outputs)
            await mailbox.arrived.wait()

    async def until_empty(self, seconds: float) -> None:
        """Waits until every request has ended, for so long at most."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.mailboxes and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    def _awaken(self, mailbox: Mailbox) -> None:
        """Wakes a reader. One call into an event loop wakes all that wait there, so a busy loop is not flooded."""
        awakened = self._awakened.get(mailbox.loop)
        if awakened is not None:
            awakened[mailbox] = None
            return
        self._awakened[mailbox.loop] = {mailbox: None}
        try:
            mailbox.loop.call_soon_threadsafe(self._ring, mailbox.loop)
        except RuntimeError:  # that loop is closed: nobody reads there any more
            del self._awakened[mailbox.loop]

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the event loop: wakes the readers whose mailboxes were filled."""
        with self.lock:
            awakened = self._awakened.pop(loop)
        for mailbox in awakened:
            mailbox.wake()


class Source(Protocol):
    """What a stream needs of its engine."""

    @property
    def room(self) -> Mailroom: ...

    def abort(self, request_id: str) -> None: ...

    def check_thread(self) -> None:
        """Raises where waiting for the engine would be waiting for oneself."""
        ...


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, as they come; closing or dropping the stream early aborts the request.

    Deltas that were not fetched in time arrive joined. The last output is the one with `finished`.
    """

    def __init__(self, engine: Source, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._over = False
        self._is_awaited = False
        self._change: Callable[[RequestOutput], RequestOutput] | None = None

    def change(self, change: Callable[[RequestOutput], RequestOutput]) -> None:
        """Readers get what this makes of each output."""
        self._change = change

    @property
    def request(self) -> Request:
        return self._mailbox.request

    @property
    def is_over(self) -> bool:
        """Whether the last output has been read, or the stream was closed."""
        return self._over

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        self._engine.check_thread()
        if self._is_awaited:  # of two, one would wait for ever: the last output comes once
            raise InvalidInputError("this stream is being read by another task")
        self._is_awaited = True
        try:
            output = await self._engine.room.fetch(self._mailbox)
        except asyncio.CancelledError:
            self.close()
            raise
        except RamifyError:
            self._over = True
            raise
        finally:
            self._is_awaited = False
        self._over = output.finished
        return output if self._change is None else self._change(output)

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Calls it in the reader's event loop whenever something came; None: nobody any more. `take` then has it."""
        self._mailbox.listener = listener

    def take(self, *, joined: bool = False) -> list[RequestOutput]:
        """What came since the last time, without waiting: one by one, or joined into one output."""
        if self._over:
            return []
        try:
            outputs = self._engine.room.take(self._mailbox)
        except RamifyError:
            self._over = True
            raise
        if outputs:
            self._over = outputs[-1].finished
        if self._change is not None:
            outputs = list(map(self._change, outputs))
        return [self._mailbox.joined(outputs)] if joined and len(outputs) > 1 else outputs

    async def final(self) -> RequestOutput:
        """Reads to the end and returns all outputs merged into one."""
        everything: RequestOutput | None = None
        async for output in self:
            everything = output if everything is None else self._mailbox.joined((everything, output))
        if everything is None:
            raise InvalidInputError("this stream has been read to its end already")
        return everything

    def close(self) -> None:
        """Ends reading: the request is aborted, and its blocks are free after the present step."""
        if not self._over:
            self._over = True
            self._engine.abort(self.request.request_id)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
