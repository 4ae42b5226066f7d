"""Aside: what runs beside the rest of a step, on a stream of its own: two models both read their weights, and neither
fills the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ramify.device.graphs import Graphs
from ramify.device.guard import through


class Aside:
    """`graphs` are for what runs there: those of the rest use memory that it must not use."""

    def __init__(self, device: torch.device, *, use_graphs: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_under_way = False
        self.graphs = Graphs(device, use_graphs=use_graphs, aside=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """After all that was launched before, and beside what is launched from now on.

        What runs for the first time, before it is captured, runs alone: forms of products may be measured then.
        """
        if self._stream is None:
            yield
            return
        num_captured = len(self.graphs.captured)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_under_way = True
        with through(self._stream):
            yield
        if len(self.graphs.captured) > num_captured:
            self.join()

    def join(self) -> None:
        """What is launched from now on comes after what runs there."""
        if self._is_under_way and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_under_way = False
