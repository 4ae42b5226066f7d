"""What several engines have to tell, each and in sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from ramify.engine.observations import Distribution, EngineState, Observations
from ramify.errors import EngineLostError
from ramify.remote.link import Link

# What an engine that is gone has none of; its other counts stay in the sum, so that no sum ever falls.
NOW = ("running", "waiting", "blocks_total", "blocks_in_use")


class States:
    """Asks the engines' processes; of one that is gone, the last that it told."""

    def __init__(self, links: Sequence[Link], model: int) -> None:
        self._links = links
        self._model = model
        self._last: list[EngineState | None] = [None] * len(links)

    def each(self) -> list[EngineState]:
        for index, link in enumerate(self._links):
            try:
                self._last[index] = link.ask(self._model)
            except EngineLostError:
                known = self._last[index]
                if known is not None:
                    self._last[index] = replace(known, stats=known.stats | dict.fromkeys(NOW, 0), num_unfinished=0)
        return [state for state in self._last if state is not None]

    def sum(self, num_waiting: int, num_unfinished: int) -> EngineState:
        """Of all; `num_waiting` children wait for an engine."""
        states = self.each()
        total = added([state.stats for state in states])
        total["waiting"] = total.get("waiting", 0) + num_waiting
        return EngineState(
            stats=total,
            num_unfinished=num_unfinished,
            observations=_observed([state.observations for state in states]),
            models=[added(list(of_role)) for of_role in zip(*(state.models for state in states), strict=True)],
            replicas=[state.stats for state in states],
        )


def added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The sum of each number."""
    total: dict[str, int] = {}
    for each in counts:
        for name, value in each.items():
            total[name] = total.get(name, 0) + value
    return total


def _observed(several: Sequence[Observations]) -> Observations:
    whole = Observations()
    for observed in several:
        for field in fields(Observations):
            mine, other = getattr(whole, field.name), getattr(observed, field.name)
            if isinstance(mine, Distribution):
                mine.counts = [one + two for one, two in zip(mine.counts, other.counts, strict=True)]
                mine.total += other.total
            else:
                for reason, count in other.items():
                    mine[reason] = mine.get(reason, 0) + count
    return whole
