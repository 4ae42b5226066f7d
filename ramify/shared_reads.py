"""Which chunks of a step may read the same leading blocks together; looked for again only when rows have changed."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.kv.sharing import best_sharing
from ramify.plan import Chunk, SharedPrefix
from ramify.sequence import Track


class SharedReads:
    """`block_sizes` are those of the models."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = block_sizes
        self._known: list[tuple[int, list[Track]]] | None = None  # None: rows changed, find out again

    def forget(self) -> None:
        """Rows came, went or were forked."""
        self._known = None

    def find(self, chunks: Sequence[Chunk], tracks: Sequence[Track]) -> list[SharedPrefix]:
        """Of the chunks of a step, and whose they are."""
        if self._known is None:
            self._known = self._look(chunks, tracks)
        shared = []
        chunk_of = {track: index for index, track in enumerate(tracks)} if self._known else {}
        for num_blocks, members in self._known:
            places = tuple(chunk_of[member] for member in members if member in chunk_of)
            if len(places) > 1:
                shared.append(SharedPrefix(num_blocks, places))
        if any(len(chunk.token_ids) > 1 for chunk in chunks):
            self._known = None  # prompts on their way will share more in the next step
        return shared

    def _look(self, chunks: Sequence[Chunk], tracks: Sequence[Track]) -> list[tuple[int, list[Track]]]:
        """Only blocks that were full before this step count: a chunk's own positions are not its past."""
        found = []
        for model, block_size in enumerate(self._block_sizes):
            rows = [index for index, chunk in enumerate(chunks) if chunk.model == model]
            tables = [chunks[row].block_table[: chunks[row].start // block_size] for row in rows]
            for item in best_sharing(tables):
                found.append((item.num_blocks, [tracks[rows[row]] for row in item.rows]))
        return found
