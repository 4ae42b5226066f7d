"""Author: models that write what is asked of a problem, its samples or the answer that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ramify.distill.problems import Malformed, Problem
from ramify.engine.core import EngineCore
from ramify.engine.request import Request
from ramify.errors import InvalidInputError
from ramify.outputs import RequestOutput

Entry = dict[str, Any]  # a line of the files that a run writes


class Author(Protocol):
    """The requests that an engine is asked for problems, and what is written of its outputs."""

    @property
    def core(self) -> EngineCore:
        """Refused where it is not in this process."""
        ...

    @property
    def num_tokens(self) -> int:
        """Drawn so far."""
        ...

    @property
    def most_at_once(self) -> int:
        """Twice the problems that the engine runs at a time, so that it stays full while some of them end."""
        ...

    def request(self, problem: Problem) -> Request:
        """Raises if the models cannot take it."""
        ...

    def entries(self, problem: Problem, output: RequestOutput) -> list[Entry]: ...

    def finish(
        self, requests: Iterable[Request], *, most_at_once: int, after_step: Callable[[], None]
    ) -> Iterator[RequestOutput]: ...


class Refusals:
    """Problems that the models cannot take. If one is to stop the run, the first raises instead."""

    def __init__(self, *, stops: bool) -> None:
        self.found: list[Malformed] = []
        self._stops = stops

    def add(self, malformed: Malformed) -> None:
        if self._stops:
            raise InvalidInputError(f"the problem in {malformed}")
        self.found.append(malformed)
