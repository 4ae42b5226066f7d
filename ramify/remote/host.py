"""ModelHost: one model in the engine's process, stepped by a thread, for any number of connections.

Requests of all connections stand in one queue, in the order in which they came: none has more than its turn. After
every step each connection gets one frame with all that concerns it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ramify.drive.core_loop import CoreLoop
from ramify.engine.core import EngineCore
from ramify.engine.observations import EngineState
from ramify.engine.request import Request
from ramify.engine.search.advance import Continuation
from ramify.engine.search.child import Child
from ramify.engine.search.group import Group
from ramify.errors import EngineFaultError, ProtocolError, RamifyError
from ramify.outputs import FinishReason, RequestOutput
from ramify.remote.connection import Connection
from ramify.remote.messages import Begun, Failed, Output, Soundness, StopReason, Told, floats, integers
from ramify.remote.packing import output_message, report_message
from ramify.text.stream import TextStream

_log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """A token that a child of a told request took, and its end, if that was one."""

    number: int
    token: Continuation
    finish_reason: FinishReason | None
    stop_reason: StopReason


@dataclass(slots=True)
class Page:
    """What is to be told to one connection after this step."""

    taken: list[Taken] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    def messages(self, model: int) -> list[Any]:
        messages: list[Any] = [*self.failed]
        if self.taken or self.outputs:
            messages.append(self._told(model))
        return messages

    def _told(self, model: int) -> Told:
        rows = self.taken
        return Told(
            model=model,
            numbers=integers(row.number for row in rows),
            children=integers(row.token.child for row in rows),
            token_ids=integers(row.token.token_id for row in rows),
            logprobs=floats(row.token.logprob for row in rows),
            reports=[
                (place, report_message(row.token.report))
                for place, row in enumerate(rows)
                if row.token.report is not None
            ],
            mixtures=[(place, row.token.mixture) for place, row in enumerate(rows) if row.token.mixture is not None],
            ends=[
                (place, row.finish_reason, row.stop_reason)
                for place, row in enumerate(rows)
                if row.finish_reason is not None
            ],
            begun=self.begun,
            outputs=self.outputs,
        )


class PageLedger:
    """Enters the tokens of one request in its connection's page."""

    __slots__ = ("_connection", "_has_begun", "_number", "_pages")

    def __init__(self, pages: dict[Connection, Page], connection: Connection, number: int) -> None:
        self._pages = pages
        self._connection = connection
        self._number = number
        self._has_begun = False

    def enter(self, group: Group, token: Continuation, child: Child) -> None:
        page = self._pages.get(self._connection)
        if page is None:
            page = self._pages[self._connection] = Page()
        if not self._has_begun:
            self._has_begun = True
            times = group.metrics
            page.begun.append(
                Begun(
                    self._number,
                    group.num_cached_tokens,
                    times.arrival_time,
                    times.first_scheduled_time,
                    times.first_token_time,
                )
            )
        page.taken.append(Taken(self._number, token, child.finish_reason, child.sequence.stop_reason))


@dataclass(frozen=True, slots=True)
class Guest:
    """Whose request it is, and what it is called there."""

    connection: Connection
    number: int
    is_told: bool


class ModelHost(CoreLoop):
    """Everything but `do`, `stats` and `stop` runs in the thread of `run`."""

    def __init__(self, core: EngineCore, model: int, connections: Callable[[], list[Connection]]) -> None:
        super().__init__(core)
        self._engine = core
        self._model = model
        self._connections = connections
        self._guests: dict[str, Guest] = {}
        self._pages: dict[Connection, Page] = {}
        self._was_sound = True
        make_text = core.make_text
        # Texts are made by whoever reads them. Only stop strings must be looked for where the tokens are drawn.
        core.make_text = lambda params: make_text(params) if params.stop_strings else TextStream(None)
        core.decode = None

    def run(self) -> None:
        self._loop()

    def do(self, act: Callable[[], None]) -> None:
        """Has it done between two steps; from any thread."""
        with self._lock:
            self._inbox.append(act)
            self._called.notify()

    def state(self) -> EngineState:
        """From any thread."""
        return EngineState(self.stats(), len(self._guests), self.observations)

    def stop(self) -> None:
        with self._lock:
            self._stops = True
            self._called.notify()

    def add(self, connection: Connection, number: int, request: Request, *, is_told: bool) -> None:
        self._guests[request.request_id] = Guest(connection, number, is_told)
        ledger = PageLedger(self._pages, connection, number) if is_told else None
        try:
            self._engine.add_request(request, ledger)
        except RamifyError as error:
            del self._guests[request.request_id]
            self._page(connection).failed.append(self._failure([number], error))

    def abort(self, request_id: str) -> None:
        self._abort(request_id)

    def dismiss(self, connection: Connection) -> None:
        """Aborts what is left of a connection's requests."""
        for request_id in [name for name, guest in self._guests.items() if guest.connection is connection]:
            self._abort(request_id)

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            guest = self._guests[output.request_id]
            if output.finished:
                del self._guests[output.request_id]
            message = output_message(guest.number, output, is_told=guest.is_told)
            self._page(guest.connection).outputs.append(message)

    def _drop_known(self, failure: EngineFaultError) -> None:
        numbers: dict[Connection, list[int]] = {}
        for guest in self._guests.values():
            numbers.setdefault(guest.connection, []).append(guest.number)
        self._guests = {}
        self._pages.clear()  # ledgers hold the dictionary itself
        for connection, known in numbers.items():
            self._page(connection).failed.append(self._failure(known, failure))

    def _turn(self) -> None:
        """Sends what the last step and the acts since then have left."""
        if self._is_sound is not self._was_sound:
            self._was_sound = self._is_sound
            for connection in self._connections():
                connection.send([Soundness(self._model, self._is_sound)])
        for connection, page in self._pages.items():
            try:
                connection.send(page.messages(self._model))
            except ProtocolError as error:  # what cannot be sent ends the requests that it was about
                numbers = [row.number for row in page.taken] + [output.number for output in page.outputs]
                for number in dict.fromkeys(numbers):
                    self._engine.abort(name_of(connection, number))
                    self._guests.pop(name_of(connection, number), None)
                connection.send([self._failure(list(dict.fromkeys(numbers)), error)])
        self._pages.clear()

    def _page(self, connection: Connection) -> Page:
        return self._pages.setdefault(connection, Page())

    def _failure(self, numbers: list[int], error: RamifyError) -> Failed:
        return Failed(self._model, numbers, type(error).__name__, str(error))


def name_of(connection: Connection, number: int) -> str:
    """A request's name in the core: connections number their requests as they like."""
    return f"{connection.key}-{number}"
