"""Searches whose beams the device chooses by itself: which of a step's draws they make, and what it is told of them."""

from __future__ import annotations

from ramify.engine.plan import Selection
from ramify.engine.search.beam import BeamSearch
from ramify.engine.search.group import Group
from ramify.engine.sequence import Sequence


class ChosenSearches:
    """Of one step; its draws are added in their order, so that those of one search lie together."""

    def __init__(self) -> None:
        self._beams: dict[str, tuple[Group, list[Sequence], int]] = {}  # with the number of the first one's draw

    def add(self, group: Group, sequence: Sequence, draw: int) -> None:
        """A beam of this search draws with the plan's draw of this number."""
        _, beams, _ = self._beams.setdefault(sequence.request_id, (group, [], draw))
        beams.append(sequence)

    def selections(self) -> list[Selection]:
        found = (_selection(*each) for each in self._beams.values())
        return [each for each in found if each is not None]


def _selection(group: Group, beams: list[Sequence], first: int) -> Selection | None:
    """Of a search all of whose beams run; None while there are fewer, or where some of them are kept by name."""
    if len(beams) < group.demands.params.resolved_beam_width or group.request.keeps:
        return None
    number, draws = group.demands.number, range(first, first + len(beams))
    if beams[0].num_pending:
        return Selection(number, draws, None)
    assert isinstance(group.strategy, BeamSearch), "nothing else is chosen by kernels"
    totals, order = group.strategy.standing([beam.child for beam in beams])
    return Selection(number, draws, totals, order)
