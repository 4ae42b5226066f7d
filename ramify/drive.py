"""Driving an engine from a plain Python call: requests in, a progress bar, outputs out."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from tqdm import tqdm

from ramify.core import EngineCore
from ramify.outputs import RequestOutput
from ramify.request import Request


def run(core: EngineCore, requests: list[Request], *, use_tqdm: bool) -> list[RequestOutput]:
    """The finished outputs, in the requests' order."""
    finished: dict[str, RequestOutput] = {}
    with (
        _without_collecting_what_is_there(),
        tqdm(total=len(requests), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar,
    ):
        before = core.metrics.generated_tokens
        for output in steps(core, requests):
            if output.finished:
                finished[output.request_id] = output
                tokens = core.metrics.generated_tokens - before
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
                bar.update()
    return [finished[request.request_id] for request in requests]


def steps(core: EngineCore, requests: list[Request]) -> Generator[RequestOutput]:
    """Adds requests, steps until they have ended, yields their outputs; whatever stops it aborts them."""
    try:
        for request in requests:
            core.add_request(request)
        while core.has_unfinished():
            yield from core.step()
    finally:
        for request in requests:
            core.abort(request.request_id)


def finish(core: EngineCore, requests: Iterable[Request], *, most_at_once: int) -> Iterator[RequestOutput]:
    """Outputs as they end; requests are taken as others end, so they may be any number. What stops it aborts them."""
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
def _without_collecting_what_is_there() -> Iterator[None]:
    """Python's collector looks through all objects again and again while tokens are drawn: not through the old ones."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
