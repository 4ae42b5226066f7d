"""Which chunks of one model's step may read the same leading blocks together; looked for only when rows changed."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.engine.plan import Chunk, SharedPrefix
from ramify.engine.sharing import best_sharing


class SharedReads:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: list[tuple[int, list[str]]] | None = None  # block counts and keys; None: find out again

    def forget(self) -> None:
        """Rows came, went or were forked."""
        self._known = None

    def find(self, chunks: Sequence[Chunk]) -> list[SharedPrefix]:
        if not chunks:
            return []
        if self._known is None:
            # Only blocks that were full before this step count: a chunk's own positions are not its past.
            tables = [chunk.block_table[: chunk.start // self._block_size] for chunk in chunks]
            self._known = [
                (sharing.num_blocks, [chunks[row].key for row in sharing.rows]) for sharing in best_sharing(tables)
            ]
        shared = []
        index_of = {chunk.key: index for index, chunk in enumerate(chunks)} if self._known else {}
        for num_blocks, keys in self._known:
            sharers = tuple(index_of[key] for key in keys if key in index_of)
            if len(sharers) > 1:
                shared.append(SharedPrefix(num_blocks, sharers))
        if any(len(chunk.token_ids) > 1 for chunk in chunks):
            self._known = None  # prompts on their way will share more in the next step
        return shared
