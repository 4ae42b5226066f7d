"""A few rows' way through the pipeline as a task, so that a device can give several to threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.sampling.piece import Piece


class Task(NamedTuple):
    """is_bound: to the thread that asks for it, since it runs what callers brought."""

    process: Callable[[], Piece]
    is_bound: bool


RunTasks = Callable[[Sequence[Task]], list[Piece]]


def in_turn(tasks: Sequence[Task]) -> list[Piece]:
    return [task.process() for task in tasks]
