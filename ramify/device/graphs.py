"""Captured pieces of a step: a fast path of what runs without them all the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Where they are off, or the device has none, every piece just runs."""

    def __init__(self, device: torch.device, *, use_graphs: bool = True) -> None:
        self.are_on = use_graphs and device.type == "cuda"
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.is_patient = True
        self._seen: set[Hashable] = set()  # once, and not captured
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.are_on else None  # type: ignore[no-untyped-call]

    def run(self, shape: Hashable, body: Callable[[], object], *, patiently: bool = False) -> None:
        """Runs a body, which reads and writes buffers that stay where they are; `shape` is all else it depends on.

        It is captured when it first comes, or patiently, when it comes again (unless `is_patient` is taken away): of
        the many sizes of steps with prompts some come once.
        """
        graph = self.captured.get(shape)
        if graph is not None:
            graph.replay()
            return
        body()  # also compiles what is not compiled yet, which a capture could not
        if patiently and self.is_patient and shape not in self._seen:
            self._seen.add(shape)
        elif self.are_on:
            self.captured[shape] = self._capture(body)

    def _capture(self, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """torch.cuda.graph would empty the cache of memory first, and the next body would ask the driver for it all."""
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.captured.values()), None)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool)
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def forget(self) -> None:
        """What was captured knows addresses that are no longer true: it is captured again when it is next needed."""
        self.captured.clear()


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
