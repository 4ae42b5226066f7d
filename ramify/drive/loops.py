"""Driving an engine from a plain call: requests in, outputs out, a progress bar meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from tqdm import tqdm

from ramify.engine.core import EngineCore
from ramify.engine.request import Request
from ramify.outputs import RequestOutput

SECONDS_BETWEEN_REFRESHES = 0.5


def run(core: EngineCore, requests: list[Request], *, use_tqdm: bool) -> list[RequestOutput]:
    """The finished outputs, in the requests' order."""
    finished: dict[str, RequestOutput] = {}
    with _old_objects_frozen(), _Progress(core, len(requests), visible=use_tqdm) as progress:
        for outputs in steps(core, requests):
            ended = {output.request_id: output for output in outputs if output.finished}
            finished |= ended
            progress.update(len(ended))
    return [finished[request.request_id] for request in requests]


class _Progress:
    """A progress bar of prompts that also shows tokens per second, refreshed even while no prompt ends."""

    def __init__(self, core: EngineCore, total: int, *, visible: bool) -> None:
        self._core = core
        self._before = core.metrics.generated_tokens
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", disable=not visible)
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, num_ended: int) -> None:
        now = time.monotonic()
        if self._bar.disable or not (num_ended or now - self._shown > SECONDS_BETWEEN_REFRESHES):
            return
        speed = (self._core.metrics.generated_tokens - self._before) / max(now - self._start, 1e-9)
        self._bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=not num_ended)
        self._bar.update(num_ended)
        self._shown = now


def steps(core: EngineCore, requests: list[Request]) -> Generator[list[RequestOutput]]:
    """Adds requests and yields each step's outputs until all have ended; leaving early, or an error, aborts them."""
    try:
        for request in requests:
            core.add_request(request)
        while core.has_unfinished():
            yield core.step()
    finally:
        for request in requests:
            core.abort(request.request_id)


def finish(core: EngineCore, requests: Iterable[Request], *, most_at_once: int) -> Iterator[RequestOutput]:
    """Finished outputs, in whatever order; at most `most_at_once` requests are in the engine at a time.

    So there may be any number of requests. Leaving early, or an error, aborts those that are running.
    """
    waiting = iter(requests)
    running: set[str] = set()
    try:
        while True:
            for request in islice(waiting, most_at_once - len(running)):
                core.add_request(request)
                running.add(request.request_id)
            if not running:
                return
            for output in core.step():
                if output.finished:
                    running.discard(output.request_id)
                    yield output
    finally:
        for request_id in running:
            core.abort(request_id)


@contextmanager
def _old_objects_frozen() -> Iterator[None]:
    """Keeps Python's garbage collector from scanning, again and again, the objects that were there before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
