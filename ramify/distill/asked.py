"""Asked: problems on their way through an engine, a request for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ramify.distill.problems import Malformed, Problem
from ramify.engine.request import Request
from ramify.errors import InvalidInputError
from ramify.outputs import RequestOutput


class Asked:
    """Knows which problem an output belongs to. `refused` are those that no request could be made of.

    With `stops_at_refused` the first of them raises instead.
    """

    def __init__(self, *, stops_at_refused: bool) -> None:
        self.refused: list[Malformed] = []
        self._stops = stops_at_refused
        self._problems: dict[str, Problem] = {}  # by the name of their request

    def requests(
        self, problems: Iterable[Problem], make: Callable[[Problem], Request], *, refusal: str = ""
    ) -> Iterator[Request]:
        """Made one by one, as the engine takes them; `refusal` stands before what is wrong with one."""
        for problem in problems:
            try:
                request = make(problem)
            except InvalidInputError as error:
                malformed = Malformed(problem.line, f"{refusal}{error}")
                if self._stops:
                    raise InvalidInputError(f"the problem in {malformed}") from None
                self.refused.append(malformed)
                continue
            self._problems[request.request_id] = problem
            yield request

    def problem_of(self, output: RequestOutput) -> Problem:
        """Once: then it is forgotten."""
        return self._problems.pop(output.request_id)
