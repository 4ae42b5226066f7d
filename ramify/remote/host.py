"""ModelHost: one model in the engine's process, stepped by a thread, for any number of connections.

Requests of all connections stand in one queue, in the order in which they came: none has more than its turn. After
every step each connection gets one frame with all that concerns it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ramify.drive.core_loop import CoreLoop, fault_of
from ramify.engine.core import EngineCore
from ramify.engine.observations import EngineState
from ramify.engine.plan import TokenReport
from ramify.engine.request import Request
from ramify.errors import EngineFaultError, RamifyError
from ramify.outputs import FinishReason, MixtureReport, RequestMetrics, RequestOutput
from ramify.remote.connection import Connection
from ramify.remote.messages import Begun, Failed, Output, Soundness, StopReason, Told, floats, integers
from ramify.remote.packing import output_message, report_message
from ramify.text.stream import TextStream

_log = logging.getLogger(__name__)


class Page:
    """What is to be told to one connection: tokens of told requests in columns, outputs that are due, failures."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.numbers: list[int] = []
        self.children: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.reports: list[tuple[int, TokenReport]] = []
        self.mixtures: list[tuple[int, MixtureReport]] = []
        self.ends: list[tuple[int, int, FinishReason, StopReason]] = []  # number, child
        self.begun: list[Begun] = []
        self.outputs: list[Output] = []
        self.failed: list[Failed] = []

    def torn_out(self, model: int) -> list[Any]:
        """The messages; the page is empty then."""
        messages: list[Any] = [*self.failed]
        if self.numbers or self.outputs:
            messages.append(self._told(model))
        self._clear()
        return messages

    def _told(self, model: int) -> Told:
        ends = []
        if self.ends:
            row_of = {key: row for row, key in enumerate(zip(self.numbers, self.children, strict=True))}
            ends = [(row_of[number, child], reason, stop_reason) for number, child, reason, stop_reason in self.ends]
        return Told(
            model=model,
            numbers=integers(self.numbers),
            children=integers(self.children),
            token_ids=integers(self.token_ids),
            logprobs=floats(self.logprobs),
            reports=[(row, report_message(report)) for row, report in self.reports],
            mixtures=self.mixtures,
            ends=ends,
            begun=self.begun,
            outputs=self.outputs,
        )


class PageLedger:
    """Enters the tokens of one request in its connection's page."""

    __slots__ = ("_number", "_page")

    def __init__(self, page: Page, number: int) -> None:
        self._page = page
        self._number = number

    def begin(self, num_cached_tokens: int, times: RequestMetrics) -> None:
        begun = (times.arrival_time, times.first_scheduled_time, times.first_token_time)
        self._page.begun.append(Begun(self._number, num_cached_tokens, *begun))

    def enter(
        self, child: int, token_id: int, logprob: float, report: TokenReport | None, mixture: MixtureReport | None
    ) -> None:
        page = self._page
        if report is not None:
            page.reports.append((len(page.numbers), report))
        if mixture is not None:
            page.mixtures.append((len(page.numbers), mixture))
        page.numbers.append(self._number)
        page.children.append(child)
        page.token_ids.append(token_id)
        page.logprobs.append(logprob)

    def end(self, child: int, reason: FinishReason, stop_reason: StopReason) -> None:
        self._page.ends.append((self._number, child, reason, stop_reason))


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
        core.make_text = lambda params, prompt: make_text(params, prompt) if params.stop_strings else TextStream(None)
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
        return EngineState(self.stats(), len(self._guests), self.observations, self._engine.model_stats())

    def stop(self) -> None:
        with self._lock:
            self._stops = True
            self._called.notify()

    def prepare(self, request: Request) -> None:
        """Builds what a request needs before the engine's thread sees it; from any thread. Raises RamifyError."""
        self._engine.prepare(request)

    def add(self, connection: Connection, number: int, request: Request, *, is_told: bool) -> None:
        self._guests[request.request_id] = Guest(connection, number, is_told)
        ledger = PageLedger(self._page(connection), number) if is_told else None
        try:
            self._engine.add_request(request, ledger)
        except RamifyError as error:
            del self._guests[request.request_id]
            self._page(connection).failed.append(self._failure([number], error))

    def abort(self, request_id: str) -> None:
        self._abort(request_id)

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def dismiss(self, connection: Connection) -> None:
        """Aborts what is left of a connection's requests."""
        for request_id in [name for name, guest in self._guests.items() if guest.connection is connection]:
            self._abort(request_id)

    def forget(self, connection: Connection) -> None:
        """Nothing can be told to it any more."""
        self.dismiss(connection)
        self._pages.pop(connection, None)

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
        for page in self._pages.values():  # what the step had told already
            page.torn_out(self._model)
        for connection, known in numbers.items():
            self._page(connection).failed.append(self._failure(known, failure))

    def _turn(self) -> None:
        """Sends what the last step and the acts since then have left."""
        if self._is_sound is not self._was_sound:
            self._was_sound = self._is_sound
            for connection in self._connections():
                connection.send([Soundness(self._model, self._is_sound)])
        for connection, page in self._pages.items():
            numbers, outputs = page.numbers, page.outputs
            try:
                messages = page.torn_out(self._model)
                if messages:
                    connection.send(messages)
            except Exception as error:  # what cannot be sent ends the requests that it was about
                if not isinstance(error, RamifyError):
                    _log.exception("outputs cannot be sent")
                mentioned = dict.fromkeys([*numbers, *(output.number for output in outputs)])
                for number in mentioned:
                    self._engine.abort(name_of(connection, number))
                    self._guests.pop(name_of(connection, number), None)
                told = error if isinstance(error, RamifyError) else fault_of(error)
                connection.send([self._failure(list(mentioned), told)])

    def _page(self, connection: Connection) -> Page:
        return self._pages.setdefault(connection, Page())

    def _failure(self, numbers: list[int], error: RamifyError) -> Failed:
        return Failed(self._model, numbers, type(error).__name__, str(error))


def name_of(connection: Connection, number: int) -> str:
    """A request's name in the core: connections number their requests as they like."""
    return f"{connection.key}-{number}"
