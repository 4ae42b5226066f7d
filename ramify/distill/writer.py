"""Writer: where authors work, on an engine of this process or on others elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ramify.distill.author import Author, Entry, Refusals
from ramify.distill.oracle import Oracle, OracleAuthor
from ramify.distill.problems import Malformed, Problem
from ramify.distill.recipe import Recipe
from ramify.distill.samples import SampleAuthor
from ramify.engine.request import Request
from ramify.errors import InvalidInputError

if TYPE_CHECKING:
    from ramify.optimal import OptimalSampling


class Writer(Protocol):
    @property
    def num_tokens(self) -> int:
        """How many were drawn so far."""
        ...

    def write(
        self, problems: Sequence[Problem], refusals: Refusals, after_step: Callable[[], None]
    ) -> Iterator[list[Entry]]:
        """All entries of one problem after another, in whatever order they are done; `after_step` now and then."""
        ...

    def close(self) -> None:
        """Gives back what the models held."""
        ...


class Writers(Protocol):
    """Who writes a run's samples and, where problems lack answers, these."""

    def samples(self) -> Writer: ...

    def answers(self) -> Writer: ...


class EngineWriter:
    """An author on an engine of this process."""

    def __init__(self, author: Author) -> None:
        self._author: Author | None = author

    @property
    def num_tokens(self) -> int:
        return 0 if self._author is None else self._author.num_tokens

    def write(
        self, problems: Sequence[Problem], refusals: Refusals, after_step: Callable[[], None]
    ) -> Iterator[list[Entry]]:
        author = self._author
        assert author is not None, "closed"
        asked: dict[str, Problem] = {}  # by the name of their request

        def requests() -> Iterator[Request]:
            for problem in problems:
                try:
                    request = author.request(problem)
                except InvalidInputError as error:
                    refusals.add(Malformed(problem.line, str(error)))
                    continue
                asked[request.request_id] = problem
                yield request

        for output in author.finish(requests(), most_at_once=author.most_at_once, after_step=after_step):
            yield author.entries(asked.pop(output.request_id), output)

    def close(self) -> None:
        import torch

        self._author = None
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where no GPU is in use


@dataclass(frozen=True)
class WritersHere:
    """Loads the models of a recipe into this process, each when it is needed."""

    recipe: Recipe
    load: Callable[[], OptimalSampling]
    load_oracle: Callable[[], Oracle] | None = None

    def samples(self) -> Writer:
        return EngineWriter(SampleAuthor(self.load(), self.recipe))

    def answers(self) -> Writer:
        if self.load_oracle is None:
            raise InvalidInputError("some problems have no answer: an oracle is needed to write them")
        return EngineWriter(OracleAuthor(self.load_oracle(), self.recipe))
