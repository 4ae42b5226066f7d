"""ChainedDrafter: a model drafts on the device, a pass for each token, and the host waits for none of them.

The host does not know the drafts, so tokens stand in for them (GUESS and below). They are made ready while the step
before is under way, and launched as soon as its tokens are known, before anything else is made of these.

    passes     t | d d d        the model that drafts, from the last token that was drawn
    check      t   d d d        all at once; then a draw after each
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from ramify.engine.blocks import BlockManager
from ramify.engine.demands import Demands
from ramify.engine.drafting.drafter import Standing, Wanted
from ramify.engine.plan import BlockCopy, Chunk, Draw, Row, SharedPrefix, Work, guessed
from ramify.engine.sequence import Sequence, Track
from ramify.engine.shared_reads import SharedReads


class DraftingDevice(Protocol):
    @property
    def most_drafting(self) -> int:
        """How many positions may be computed for drafts at once."""

    def draft(self, work: Work, draws: Items[Draw], length: int) -> None:
        """Drafts so many tokens behind the last one of each chunk, for the next plan; does not wait for them."""

    def draft_next(self, work: Work, draws: Items[Draw], length: int) -> None:
        """The same as soon as the plan under way is known, which checks drafts of these sequences."""


class ChainedDrafter(ABC):
    def __init__(
        self,
        device: DraftingDevice,
        manager: BlockManager,
        *,
        cost: float,
        role: int,
        max_model_len: int,
        num_known: int | None = None,
    ) -> None:
        """cost: of a pass, in steps without drafts. role: of the track whose prompt it sees. manager: of its blocks.
        num_known: the tokens that it knows, the first ones; None: all."""
        self.cost = cost
        self._device = device
        self._manager = manager
        self._role = role
        self._shared_reads = SharedReads(manager)
        self._max_model_len = max_model_len
        self._num_known = num_known
        self._next: dict[str, tuple[Sequence, tuple[int, ...]]] = {}  # by sequence: what is drafted for the next step
        self._ahead: dict[str, tuple[Standing, tuple[int, ...]]] = {}  # and where it will stand

    @property
    def most_positions(self) -> int:
        return self._device.most_drafting

    @property
    def is_ahead(self) -> bool:
        return bool(self._ahead)

    def serves(self, demands: Demands) -> bool:
        """Whether it knows the tokens, and the step that checks its drafts can draw by kernels that know no more than
        the device does."""
        return not demands.is_controlled and demands.sampler != "full" and self._knows(demands.largest_token_id)

    def _knows(self, token_id: int) -> bool:
        return self._num_known is None or token_id < self._num_known

    # -- drafting --------------------------------------------------------------------------------------------

    def draft(self, wanted: Items[Wanted]) -> list[tuple[int, ...]]:
        """What stands for the tokens of each, as many for all: the fewest that anybody wants."""
        standings = [
            Standing(sequence, demands, len(sequence.output_token_ids), sequence.output_token_ids[-1])
            for sequence, demands, _ in wanted
        ]
        if self._ahead:
            ahead, self._ahead = self._ahead, {}
            return [_tokens_of(standing, ahead) for standing in standings]
        return self._launch(standings, min([each.most for each in wanted], default=0))

    def draft_next(self, standings: Items[Standing], num_drafted: int, length: int) -> None:
        """For the step after the one under way; all of them find room, or none is drafted for."""
        work = Work()
        draws: list[Draw] = []
        for each in standings:
            if not self._place(each, num_drafted + 1 + length, len(standings), work):
                return
            draws.append(_draw(each, len(draws)))
        self._next = {
            each.sequence.seq_id: (each.sequence, guessed(place, length)) for place, each in enumerate(standings)
        }
        work.shared = self._shared(work)
        self._device.draft_next(work, draws, length)

    def confirm(self, standings: Items[Standing]) -> None:
        """The step is known, and these go on: what was drafted for them is theirs when they are asked for."""
        self._ahead, expected = {}, self._next
        self._next = {}
        for each in standings:
            sequence, tokens = expected.get(each.sequence.seq_id, (None, ()))
            if sequence is each.sequence:
                self._ahead[sequence.seq_id] = (each, tokens)

    def _launch(self, standings: Items[Standing], length: int) -> list[tuple[int, ...]]:
        if not length:
            return [()] * len(standings)
        self._catch_up(standings)
        work = Work()
        draws: list[Draw] = []
        drafted: list[tuple[int, ...]] = []
        for each in standings:
            if self._place(each, length, len(standings), work):
                drafted.append(guessed(len(draws), length))
                draws.append(_draw(each, len(draws)))
            else:
                drafted.append(())
        if draws:
            work.shared = self._shared(work)
            self._device.draft(work, draws, length)
        return drafted

    def _shared(self, work: Work) -> list[SharedPrefix]:
        self._shared_reads.forget()  # tables may have changed since
        return self._shared_reads.find(work.chunks)

    def _place(self, each: Standing, num_ahead: int, num_spare: int, work: Work) -> bool:
        """Gives its last token and so many positions behind it blocks, and the token a chunk; returns whether there was
        room, with so many blocks to spare."""
        track, manager = each.sequence.tracks[self._role], self._manager
        start = self._start(each)
        end = start + num_ahead + 1
        longest = max(len(other.prompt_token_ids) for other in each.sequence.tracks) + each.num_output + num_ahead
        if longest > self._max_model_len or not self._is_ready(each, start) or not self._knows(each.last_token_id):
            return False
        if manager.num_new_blocks(track.key, start, end) > manager.num_free - num_spare:
            return False
        work.copies.extend(BlockCopy(*pair) for pair in manager.extend(track.key, start, end))
        work.chunks.append(Chunk((each.last_token_id,), start, manager.table(track.key), track.key))
        self._note(each, end)
        return True

    def _start(self, each: Standing) -> int:
        """The position of its last token."""
        return len(self._track(each).prompt_token_ids) + each.num_output - 1

    def _track(self, each: Standing) -> Track:
        return each.sequence.tracks[self._role]

    # -- what its blocks hold ----------------------------------------------------------------------------------

    @abstractmethod
    def _catch_up(self, standings: Items[Standing]) -> None:
        """Computes what comes before the last token of each."""

    @abstractmethod
    def _is_ready(self, each: Standing, start: int) -> bool:
        """Whether all positions before this one are computed."""

    @abstractmethod
    def _note(self, each: Standing, end: int) -> None:
        """Positions before this one are about to be computed, from the last token on with drafts."""

    # -- sequences come and go -------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        self._next.pop(sequence.seq_id, None)
        self._ahead.pop(sequence.seq_id, None)

    def end(self, request_id: str) -> None:
        """Its sequences have been forgotten one by one."""
        assert not any(sequence.request_id == request_id for sequence, _ in self._next.values())

    def reset(self) -> None:
        self._next, self._ahead = {}, {}
        self._shared_reads.forget()


def _draw(each: Standing, place: int) -> Draw:
    """The token after its last one, from the logits after the chunk of this place."""
    child = each.sequence.child
    return Draw(each.sequence.request_id, child, child, each.num_output, (Row(0, place, 0),), each.demands)


def _tokens_of(standing: Standing, ahead: Mapping[str, tuple[Standing, tuple[int, ...]]]) -> tuple[int, ...]:
    """What was drafted for it, if it stands where it was expected."""
    then, tokens = ahead.get(standing.sequence.seq_id, (None, ()))
    is_expected = then is not None and then.sequence is standing.sequence and then.num_output == standing.num_output
    return tokens if is_expected else ()
