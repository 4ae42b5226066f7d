"""Gangs: sequences that are scheduled together or not at all.

Beams of one search, and diverse siblings, look at each other in every step: they advance, wait and give up their blocks
as one. Any other sequence is a gang of one.
"""

from __future__ import annotations

from bisect import insort
from itertools import takewhile

from ramify.engine.sequence import Order, Sequence, SequenceStatus, Track


class Gang:
    """Sequences that are all in one state; before the first fork the root stands for all.

    They come in the order of their numbers; a fork that takes the place of another of them stands where that one stood.
    """

    __slots__ = ("may_regrow", "num_together", "order", "restart", "sequences")

    def __init__(self, sequence: Sequence, *, num_together: int | None = None, may_regrow: bool = False) -> None:
        self.sequences = [sequence]
        self.order: Order = sequence.order  # who goes first: the lower
        self.num_together = num_together  # how many step together once the root has forked; None: forks go their way
        self.may_regrow = may_regrow  # whether there may be fewer of them for a while, and then all again
        self.restart: list[int] = []  # positions that the first computes alone, before the others fork from it again

    @property
    def status(self) -> SequenceStatus:
        return self.sequences[0].status

    @property
    def size(self) -> int:
        """How many sequences it counts for: those that will be, as long as the root is alone or some may come back."""
        if self.num_together is not None and (self.may_regrow or not self.sequences[0].output_token_ids):
            return self.num_together
        return len(self.sequences)

    @property
    def decodes(self) -> bool:
        """Whether each of its sequences has one track that lacks one position: most of them, in most steps."""
        if self.restart:
            return False
        for sequence in self.sequences:
            tracks = sequence.tracks
            if len(tracks) > 1 or sequence.is_blocked or sequence.num_missing(tracks[0]) != 1:
                return False
        return True

    def move(self, target: SequenceStatus) -> None:
        for sequence in self.sequences:
            sequence.move(target)

    def tracks(self) -> list[tuple[Sequence, Track]]:
        return [(sequence, track) for sequence in self.sequences for track in sequence.tracks]

    def join(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=_number)

    def missing(self) -> list[int]:
        """Positions that each track has still to compute before the next tokens can be drawn; none if blocked."""
        if len(self.sequences) == 1:  # most of them
            alone = self.sequences[0]
            return [0 if alone.is_blocked else alone.num_missing(track) for track in alone.tracks]
        if any(sequence.is_blocked for sequence in self.sequences):
            return [0] * (len(self.sequences) * len(self.sequences[0].tracks))
        if self.restart:  # the others follow when the first has come to where they part
            leader = self.sequences[0]
            lacking = [end - track.num_computed for track, end in zip(leader.tracks, self.restart, strict=True)]
            return lacking + [0] * (len(leader.tracks) * (len(self.sequences) - 1))
        return [sequence.num_missing(track) for sequence in self.sequences for track in sequence.tracks]

    def num_common(self) -> list[int]:
        """For each track of the first: how many leading tokens all have in common, and have at least one after."""
        outputs = [sequence.output_token_ids for sequence in self.sequences]
        same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*outputs, strict=False))
        common = min(sum(1 for _ in same), min(map(len, outputs)) - 1)
        return [len(track.prompt_token_ids) + common for track in self.sequences[0].tracks]


def _number(member: Sequence) -> int:
    return member.child
