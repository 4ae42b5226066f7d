"""KeptPrefixes: what ended sequences leave in blocks, by name, so that later requests begin where they ended.

    sequence   [7][2][5]      ends; kept as "a"       "a" holds 7, 2 and 5 in its stead
    request    [7][2][5]      begins with "a"         shares them, and copies 5 before it writes there

Nothing preempts what is kept: who keeps it gives it back. Names can be dropped from anywhere, also while a step runs;
their blocks are freed when the engine next begins something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ramify.engine.blocks import BlockManager
from ramify.engine.sequence import Sequence


class KeptPrefixes:
    def __init__(self, managers: list[BlockManager]) -> None:
        self._managers = managers
        self._models: dict[str, list[tuple[int, int]]] = {}  # by name: of each track, its model and computed positions
        self._dropped: deque[str] = deque()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __len__(self) -> int:
        return len(self._models)

    def names(self) -> list[str]:
        return list(self._models)

    @property
    def num_blocks(self) -> int:
        """Different blocks that are kept."""
        return sum(len(blocks) for blocks in self.blocks())

    def blocks(self) -> list[set[int]]:
        """Of each model, those that are kept."""
        held: list[set[int]] = [set() for _ in self._managers]
        for name, tracks in self._models.items():
            for role, (model, _) in enumerate(tracks):
                held[model].update(self._managers[model].table(_key(name, role)))
        return held

    def keep(self, name: str, sequence: Sequence, holder: Sequence) -> None:
        """What `holder` has in blocks of a sequence's tokens: its own, or those of whom it was about to be forked from.

        The last output token is not among them, though a step ahead may have computed it: whoever goes on needs its
        logits, and computes it again.
        """
        self.release([name])
        kept = []
        for role, (own, held) in enumerate(zip(sequence.tracks, holder.tracks, strict=True)):
            manager = self._managers[held.model]
            end = min(held.num_computed, len(own.prompt_token_ids) + max(0, len(sequence.output_token_ids) - 1))
            manager.fork(held.key, _key(name, role), manager.blocks_for(end))
            kept.append((held.model, end))
        self._models[name] = kept

    def begin(self, name: str, sequence: Sequence) -> int:
        """A new sequence whose tokens begin with these shares their blocks; returns the positions that its first track
        need not compute. Nothing happens if nothing is kept under this name any more."""
        for role, (track, (model, end)) in enumerate(zip(sequence.tracks, self._models.get(name, ()), strict=False)):
            manager = self._managers[model]
            start = min(end, len(track.prompt_token_ids) - 1)  # the logits after its last token are wanted
            manager.fork(_key(name, role), track.key, manager.blocks_for(start))
            track.num_computed = start
        return sequence.tracks[0].num_computed

    def release(self, names: Iterable[str]) -> None:
        """Frees what nobody else holds; a name that is not there is fine."""
        for name in names:
            for role, (model, _) in enumerate(self._models.pop(name, ())):
                self._managers[model].release(_key(name, role))

    def drop(self, name: str) -> None:
        """Releases it later; safe to call from anywhere."""
        self._dropped.append(name)

    def sweep(self) -> None:
        """Releases what was dropped."""
        while self._dropped:
            self.release([self._dropped.popleft()])

    def forget(self) -> None:
        """The blocks are gone already."""
        self._models.clear()


def _key(name: str, role: int) -> str:
    """Names a block table; no track's key begins like this."""
    return f"kept {name}/{role}"
