"""When a piece of a step runs, is captured and is replayed, on a device that only notes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ramify.device.graphs import Graphs, MustRunFirstError, Shape, must_run_first


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
        return self

    def replay(self) -> None:
        self.happened.append("replayed")

    def piece(self) -> None:
        self.happened.append("captured" if self.is_capturing else "ran")


DRAWS, PROMPTS = Shape("draws", "plain", 8), Shape("with prompts", None, 64)


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


def test_warming_up_launches_every_piece_once() -> None:
    graphs = Noted()
    with graphs.warming_up():
        graphs.run(PROMPTS, graphs.piece, patiently=True)
        graphs.run(DRAWS, graphs.piece)
    assert graphs.happened == ["captured", "replayed"] * 2
    assert {kind: tally.number for kind, tally in graphs.made.items()} == {"with prompts": 1, "draws": 1}
    graphs.run(Shape("draws", "plain", 16), graphs.piece)
    assert graphs.happened[4:] == ["ran", "captured"], "outside, what comes for the first time may not be compiled yet"


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
        graphs.run(DRAWS, piece)
        graphs.run(DRAWS, piece)
    assert graphs.happened == ["ran", "captured", "replayed"]
    assert measured == ["once"]
    assert graphs.made["draws"].number == 1


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
