"""Driving an engine from plain calls, which take turns: requests in, outputs out, a progress bar meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Protocol, TypeVar

from tqdm import tqdm

from ramify.engine.request import Request
from ramify.errors import EngineBusyError
from ramify.outputs import RequestOutput
from ramify.process.garbage import old_objects_frozen

SECONDS_BETWEEN_REFRESHES = 0.5

Result = TypeVar("Result")


class Driven(Protocol):
    """What calls drive: an EngineCore, or several engines in its place."""

    @property
    def generated_tokens(self) -> int: ...

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is one that calls wait for."""
        ...

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> object: ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


class Calls:
    """The plain calls of one engine. Each has the engine to itself, and others wait until it has ended.

    So a call that is broken off, by Ctrl-C or whatever else, takes nobody's requests with it but its own. A call from
    inside another of the same thread (a processor's, or that of somebody who reads a stream) could wait for ever: it is
    refused.
    """

    def __init__(self, core: Driven) -> None:
        self._core = core
        # Taken by a plain `with` only: no signal can come between a lock and its `with`, so none can leave it taken.
        self._turn = threading.Lock()
        self._thread = 0  # whose turn it is, or was
        self._started: dict[str, None] = {}  # requests of the call whose turn it is, in their order

    def run(
        self, requests: list[Request], *, use_tqdm: bool, check: Callable[[], None] | None = None
    ) -> list[RequestOutput]:
        """The finished outputs, in the requests' order; `check` raises if, now that it is their turn, none may go."""
        finished: dict[str, RequestOutput] = {}
        self._check_thread()
        with self._turn, old_objects_frozen(), _Progress(self._core, len(requests), visible=use_tqdm) as progress:
            for outputs in self._drive(requests, check=check):
                ended = {output.request_id: output for output in outputs if output.finished}
                finished |= ended
                progress.update(len(ended))
        return [finished[request.request_id] for request in requests]

    def steps(
        self, requests: list[Request], *, check: Callable[[], None] | None = None
    ) -> Generator[list[RequestOutput]]:
        """Yields each step's outputs until all requests have ended; leaving early, or an error, aborts them."""
        self._check_thread()
        with self._turn:
            yield from self._drive(requests, check=check)

    def finish(
        self, requests: Iterable[Request], *, most_at_once: int, after_step: Callable[[], None] = lambda: None
    ) -> Generator[RequestOutput]:
        """Finished outputs, in whatever order; at most `most_at_once` requests are in the engine at a time.

        So there may be any number of requests. `after_step` is called after each of the engine's steps, once its
        finished outputs have been taken. Leaving early, or an error, aborts those that are running.
        """
        self._check_thread()
        with self._turn:
            for outputs in self._drive(requests, most_at_once=most_at_once):
                yield from (output for output in outputs if output.finished)
                after_step()

    def between(self, act: Callable[[], Result]) -> Result:
        """Does something to the engine while no call runs."""
        self._check_thread()
        with self._turn:
            self._begin()
            return act()

    def _check_thread(self) -> None:
        if self._core.is_own_thread or (self._turn.locked() and self._thread == threading.get_ident()):
            raise EngineBusyError(
                "this engine is in the middle of a call of the same thread, which could never end while another waits "
                "for it: logits processors and score functions must not call the engine they run in (a second engine "
                "may be called), and a stream must be read to its end or closed before the next call"
            )

    def _drive(
        self,
        requests: Iterable[Request],
        *,
        most_at_once: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> Generator[list[RequestOutput]]:
        """Yields each step's outputs; the turn must be this call's."""
        self._begin()
        if check is not None:
            check()
        waiting = iter(requests)
        try:
            while True:
                room = None if most_at_once is None else most_at_once - len(self._started)
                for request in islice(waiting, room):
                    self._started[request.request_id] = None
                    self._core.add_request(request)
                if not self._core.has_unfinished():
                    return
                outputs = self._core.step()
                for output in outputs:
                    if output.finished:
                        self._started.pop(output.request_id, None)
                yield outputs
        finally:
            self._end()

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._end()  # what the call before could not end, because it was broken off in its end too

    def _end(self) -> None:
        """May be broken off, and begun again."""
        for request_id in self._started:
            self._core.abort(request_id)
        self._started = {}


class _Progress:
    """A progress bar of prompts that also shows tokens per second, refreshed even while no prompt ends."""

    def __init__(self, core: Driven, total: int, *, visible: bool) -> None:
        self._core = core
        self._before = core.generated_tokens
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", disable=not (visible and total))
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, num_ended: int) -> None:
        now = time.monotonic()
        if self._bar.disable or not (num_ended or now - self._shown > SECONDS_BETWEEN_REFRESHES):
            return
        speed = (self._core.generated_tokens - self._before) / max(now - self._start, 1e-9)
        self._bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=not num_ended)
        self._bar.update(num_ended)
        self._shown = now
