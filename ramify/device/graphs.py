"""Captured pieces of a step: a fast path of what runs without them all the same."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch

from ramify.device.guard import through

Kind = Literal["decodes", "with prompts", "logits", "draws", "drafts"]


class Shape(NamedTuple):
    """Of a captured piece: all that it depends on, beside what is in the buffers that it reads."""

    kind: Kind
    of: Hashable  # the number of the model's lane, or what is asked of draws: nothing that holds the graphs themselves
    size: int  # rows, with padding
    is_shared: bool = False  # whether prefixes are read together


@dataclass(slots=True)
class Tally:
    """Graphs of one kind, and what making them took of the host."""

    number: int = 0
    seconds: float = 0.0


class MustRunFirstError(Exception):
    """A piece does something that cannot be captured: it does so when it first runs, and never again."""


def must_run_first() -> None:
    """Before what cannot be captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise MustRunFirstError


class Graphs:
    """Where they are off, or the device has none, every piece just runs."""

    def __init__(self, device: torch.device, *, use_graphs: bool = True, aside: bool = False) -> None:
        """aside: these run while others do, whose memory they must not use."""
        self.are_on = use_graphs and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if aside and self.are_on else None  # type: ignore[no-untyped-call]
        self.captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.made: dict[Kind, Tally] = {}
        self.is_patient = True
        self._captures_at_once = False
        self._seen: set[Shape] = set()  # once, and not captured
        self._ran: set[tuple[Kind, Hashable]] = set()  # in one size at least

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, every piece is captured when it first comes, and all but the first size of a kind before they have
        run: libraries make their handles when they are first called, and later sizes need launching only once."""
        self.is_patient, self._captures_at_once = False, self.are_on
        try:
            yield
        finally:
            self.is_patient, self._captures_at_once = True, False

    def run(self, shape: Shape, body: Callable[[], object], *, patiently: bool = False) -> None:
        """Runs a body, which reads and writes buffers that stay where they are; `shape` is all else it depends on.

        It is captured when it first comes, or patiently, when it comes again (unless `is_patient` is taken away): of
        the many sizes of steps with prompts some come once.
        """
        graph = self.captured.get(shape)
        began = time.perf_counter()
        if graph is None and self._captures_at_once and shape[:2] in self._ran:
            with suppress(MustRunFirstError):
                graph = self._keep(shape, body, began)
        if graph is not None:
            graph.replay()
            return
        body()  # also compiles what is not compiled yet
        self._ran.add(shape[:2])
        if patiently and self.is_patient and shape not in self._seen:
            self._seen.add(shape)
        elif self.are_on:
            self._keep(shape, body, began)

    def _keep(self, shape: Shape, body: Callable[[], object], began: float) -> torch.cuda.CUDAGraph:
        graph = self.captured[shape] = self._capture(body)
        tally = self.made.setdefault(shape.kind, Tally())
        tally.number += 1
        tally.seconds += time.perf_counter() - began
        return graph

    def _capture(self, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Not by torch.cuda.graph, which waits for the device and gives all unused memory back to it, every time.

        Relaxed: kernels may be loaded meanwhile, and other threads do as they please.
        """
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.captured.values()), None)
        with through(self._stream or capture_stream(torch.cuda.current_device())):
            graph.capture_begin(pool, capture_error_mode="relaxed")
            try:
                body()
            except BaseException:
                # The graph may be empty, or not to be ended: what went wrong first is what is told.
                with warnings.catch_warnings(), suppress(RuntimeError):
                    warnings.simplefilter("ignore")
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def forget(self) -> None:
        """What was captured knows addresses that are no longer true: it is captured again when it is next needed."""
        self.captured.clear()


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One for each GPU: cuBLAS keeps memory for every stream that it was ever called on.

    torch's own is one of the first GPU that captured anything, whichever is the current one.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def padded(count: int) -> int:
    """The rows of the graph that serves so many: coarse where rows are many, so that graphs are few."""
    for most, step in ((4, 1), (16, 4), (64, 8), (256, 16)):
        if count <= most:
            return -(-count // step) * step
    return -(-count // 32) * 32


MOST_ROWS_WITH_PROMPTS = 4096  # of a graph: the device is busy for longer with more rows than the host with launching


def padded_with_prompts(count: int) -> int:
    """The rows of the graph that serves so many rows of decodes and prompts together, at most those of the largest.

    Rows that nobody reads cost what real ones do, so sizes are as fine as graphs can be many: at most an eighth more.
    """
    for most, step in ((64, 32), (1024, 64), (2048, 128), (MOST_ROWS_WITH_PROMPTS, 256)):
        if count <= most:
            return -(-count // step) * step
    raise ValueError(f"{count} rows are more than a graph takes")
