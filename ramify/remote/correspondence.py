"""Correspondence: requests for one model of an engine's process, sent as messages, and the outputs that come back.

Whoever uses it says what becomes of outputs and failures. `send` and `abort` may be called from any thread, the rest is
called by the link's reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from ramify.engine.request import Request
from ramify.errors import EngineLostError, RamifyError
from ramify.outputs import RequestOutput
from ramify.remote.assembly import Assembly
from ramify.remote.link import Link
from ramify.remote.messages import Abort, Failed, Soundness, Told, floats_of, integers_of
from ramify.remote.packing import SentParams, add_of, own_error_of, report_of
from ramify.text.codec import TextCodec


class Correspondence:
    """`deliver` gets the outputs of a step, `fail` what became of requests that ended without one, and `lose` those
    that the engine's process took with it."""

    def __init__(
        self,
        link: Link,
        model: int,
        codec: TextCodec,
        *,
        deliver: Callable[[list[RequestOutput]], None],
        fail: Callable[[list[Assembly], RamifyError], None],
        lose: Callable[[list[Assembly], EngineLostError], None],
    ) -> None:
        self._link = link
        self._model = model
        self._codec = codec
        self._deliver = deliver
        self._fail = fail
        self._lose = lose
        self._sent: SentParams | None = None  # the last: many requests have the same parameters
        self._numbers = count()
        self._number_of: dict[str, int] = {}
        self._assemblies: dict[int, Assembly] = {}
        self.is_sound = True  # whether the engine's last step did not fail

    # -- from any thread -----------------------------------------------------------------------------------------------

    def send(self, request: Request, earlier: Assembly | None = None) -> None:
        """Its outputs go on where those of an `earlier` try ended, if there was one. Raises if it is too large."""
        number = next(self._numbers)
        sent = self._sent
        if sent is None or sent.params is not request.sampling_params:
            sent = self._sent = SentParams(request.sampling_params)
        add = add_of(self._model, number, request, sent)
        self._number_of[request.request_id] = number
        self._assemblies[number] = Assembly(request, self._codec, earlier)
        try:
            self._link.send(add)
        except BaseException:
            del self._number_of[request.request_id], self._assemblies[number]
            raise

    def abort(self, request_id: str) -> None:
        """Takes no lock, since Python may call it from a destructor at any moment."""
        number = self._number_of.get(request_id)
        if number is not None:
            self._link.send(Abort(self._model, number))

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def receive(self, message: Told | Failed | Soundness) -> None:
        match message:
            case Told():
                self.is_sound = True
                self._take(message)
            case Failed():
                self._fail(self._forgotten(message.numbers), own_error_of(message.kind, message.text))
            case Soundness():
                self.is_sound = message.is_sound

    def lose(self, error: EngineLostError) -> None:
        self._lose(self._forgotten(list(self._assemblies)), error)

    def _take(self, told: Told) -> None:
        """Outputs of all requests that the step did something for, in the order of their first tokens."""
        for begun in told.begun:
            if begun.number in self._assemblies:
                self._assemblies[begun.number].begin(begun)
        reports, mixtures = dict(told.reports), dict(told.mixtures)
        ends = {row: (reason, stop_reason) for row, reason, stop_reason in told.ends}
        grown: dict[int, Assembly] = {}
        columns = (integers_of(told.numbers), integers_of(told.children), integers_of(told.token_ids))
        for row, (number, child, token_id, logprob) in enumerate(zip(*columns, floats_of(told.logprobs), strict=True)):
            assembly = self._assemblies.get(number)
            if assembly is None:
                continue
            report = report_of(reports[row]) if row in reports else None
            assembly.take(child, token_id, logprob, report=report, mixture=mixtures.get(row), end=ends.get(row))
            grown[number] = assembly
        outputs = []
        self._drop_divergent(grown)
        for message in told.outputs:
            assembly = self._assemblies.get(message.number)
            if assembly is None:
                continue
            if message.finished:
                del self._assemblies[message.number]
                self._number_of.pop(assembly.request.request_id, None)
            if assembly.is_told:
                assembly.end(message)
                grown[message.number] = assembly
            else:
                outputs.append(assembly.whole(message))
        outputs += [output for assembly in grown.values() if (output := assembly.told()) is not None]
        if outputs:
            self._deliver(outputs)

    def _drop_divergent(self, grown: dict[int, Assembly]) -> None:
        """Ends requests that cannot go on as they began."""
        for number, assembly in list(grown.items()):
            if assembly.divergence is not None:
                self._link.send(Abort(self._model, number))
                del grown[number]
                self._fail(self._forgotten([number]), EngineLostError(assembly.divergence))

    def _forgotten(self, numbers: Sequence[int]) -> list[Assembly]:
        found = []
        for number in numbers:
            assembly = self._assemblies.pop(number, None)
            if assembly is not None:
                self._number_of.pop(assembly.request.request_id, None)
                found.append(assembly)
        return found
