"""When a piece of a step runs, is captured and is replayed, on a device that only notes it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ramify.device.graphs import Graphs, MustRunFirstError, Shape, must_run_first
from ramify.device.lane import Lane
from ramify.device.last_draws import LastDraws
from ramify.device.layers import Batch
from ramify.device.reads import Reads, SharingRule
from ramify.engine.plan import Chunk, Work


class Graph:
    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def replay(self) -> None:
        self._happened.append("replayed")


class Noted(Graphs):
    """Captures by running a body once with `is_capturing`, and notes what happened in which order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.are_on = True
        self.is_capturing = False
        self.happened: list[str] = []

    def _capture(self, body: Callable[[], object]) -> Any:
        self.is_capturing = True
        try:
            body()
        finally:
            self.is_capturing = False
        return Graph(self.happened)

    def piece(self) -> None:
        self.happened.append("captured" if self.is_capturing else "ran")


DRAWS, PROMPTS = Shape("draws", "plain", 8), Shape("with prompts", 0, 64)


def test_a_piece_runs_is_captured_and_then_replayed() -> None:
    graphs = Noted()
    for _ in range(3):
        graphs.run(DRAWS, graphs.piece)
    assert graphs.happened == ["ran", "captured", "replayed", "replayed"]


def test_patiently_it_is_captured_when_it_comes_again() -> None:
    graphs = Noted()
    for _ in range(3):
        graphs.run(PROMPTS, graphs.piece, patiently=True)
    assert graphs.happened == ["ran", "ran", "captured", "replayed"]


def test_warming_up_launches_every_size_but_the_first_once() -> None:
    graphs = Noted()
    with graphs.warming_up():
        for shape in (PROMPTS, DRAWS, DRAWS._replace(of="filtered")):
            graphs.run(shape, graphs.piece, patiently=True)
            assert graphs.happened == ["ran", "captured"], "the first of its kind"
            for size in (4, 2):
                graphs.run(shape._replace(size=size), graphs.piece, patiently=True)
            assert graphs.happened[2:] == ["captured", "replayed"] * 2
            graphs.happened.clear()
    assert {kind: tally.number for kind, tally in graphs.made.items()} == {"with prompts": 3, "draws": 6}
    graphs.run(DRAWS._replace(size=16), graphs.piece)
    assert graphs.happened == ["ran", "captured"], "outside, what comes for the first time may not be compiled yet"


def test_what_cannot_be_captured_runs_first() -> None:
    """Measuring a product, for one, needs the device; what was captured until then is thrown away."""
    graphs, measured = Noted(), list[str]()

    def piece() -> None:
        if not measured:
            if graphs.is_capturing:
                raise MustRunFirstError
            measured.append("once")
        graphs.piece()

    with graphs.warming_up():
        graphs.run(DRAWS, graphs.piece)
        graphs.run(DRAWS._replace(size=4), piece)
        graphs.run(DRAWS._replace(size=4), piece)
    assert graphs.happened == ["ran", "captured", "ran", "captured", "replayed"]
    assert measured == ["once"]
    assert graphs.made["draws"].number == 2


def test_nothing_must_run_first_where_nothing_is_captured() -> None:
    must_run_first()


def test_where_graphs_are_off_pieces_just_run() -> None:
    graphs = Graphs(torch.device("cpu"))
    ran: list[int] = []
    with graphs.warming_up():
        graphs.run(DRAWS, lambda: ran.append(1))
    graphs.run(DRAWS, lambda: ran.append(2))
    assert ran == [1, 2]
    assert not graphs.captured


class Layers:
    """Computes nothing."""

    def __init__(self) -> None:
        self.device, self.vocab_size = torch.device("cpu"), 8
        self.sharing = SharingRule(fewest_positions=64)
        self.pool = self
        self.block_size = 16

    def prepare(self, reads: Reads) -> None: ...

    def forward(self, batch: Batch, rows: Any = None) -> torch.Tensor:  # noqa: ARG002
        return torch.zeros(len(batch.token_ids), 4)

    def logits(self, hidden: torch.Tensor, out: Any = None) -> Any: ...


def test_captured_graphs_do_not_keep_their_lane() -> None:
    """A rehearsal's buffers are gigabytes: they are free when it is over, not when Python next collects its garbage."""
    graphs = Noted()
    lane = Lane(Layers(), 4, graphs)  # type: ignore[arg-type]
    lane.begin(Work([Chunk([5], 0, (0,), "one")]), LastDraws(), num_wanted=1)
    lane.compute(np.empty(0, np.int64), torch.zeros(4, dtype=torch.int64))
    assert [shape.kind for shape in graphs.captured] == ["decodes"]
    known = weakref.ref(lane)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del lane, graphs
        assert known() is None
    finally:
        if was_enabled:
            gc.enable()
