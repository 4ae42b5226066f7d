"""A lane: one model's view of the sequences that decode, row by row.

An engine with one model has one lane. A teacher and a student have a lane each, also where both are one checkpoint:
then the lanes share weights and cache, and one forward pass serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.attention.paged import PagedDecode
from ramify.cuda import rows as column
from ramify.cuda.rows import PADDING_SLOT, DeviceRows
from ramify.kernels.work_list import most_parts
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder
from ramify.plan import Chunk, SharedPrefix
from ramify.sequence import PENDING

FEWEST_SHARED_POSITIONS = 512  # reads that a group must save before a second kernel pays


class Lane:
    def __init__(self, model: int, decoder: Decoder, pool: KVPool, *, max_rows: int, max_model_len: int) -> None:
        self.model = model
        self.pool = pool
        self.attention = PagedDecode(
            max_rows=max_rows,
            max_parts=max_rows * most_parts(max_model_len),
            max_blocks=-(-max_model_len // pool.block_size),
            heads=decoder.arch.num_heads,
            kv_heads=decoder.arch.num_kv_heads,
            head_dim=decoder.arch.head_dim,
            block_size=pool.block_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.rows = DeviceRows(self.attention.tables)

    # -- on the host: the numbers of a step ------------------------------------------------------------------

    def fill(
        self,
        chunks: Sequence[Chunk],
        rows: Sequence[int],
        size: int,
        *,
        drawn_in: Mapping[str, int],
        drawn: Mapping[str, int],
    ) -> None:
        """This step's numbers of every row; rows beyond the real ones compute nothing that anybody reads.

        A token that is pending was drawn in the row of the last step that `drawn_in` names for its track, or is known
        to the host, in `drawn`.
        """
        numbers, index, block_size = self.rows.integer_mirror, np.asarray(rows, dtype=np.int64), self.pool.block_size
        numbers[column.SLOT, len(rows) : size] = PADDING_SLOT
        numbers[column.TOKEN : column.POSITION + 1, len(rows) : size] = 0
        numbers[column.PARTNER, len(rows) : size] = 0
        numbers[column.SOURCE, :size] = -1
        self.rows.float_mirror[column.TEMPERATURE, len(rows) : size] = 0
        tokens = [chunk.token_ids[0] for chunk in chunks]
        if PENDING in tokens:
            for place, chunk in enumerate(chunks):
                if tokens[place] == PENDING:
                    tokens[place] = drawn.get(chunk.key, 0)
                    numbers[column.SOURCE, rows[place]] = drawn_in.get(chunk.key, -1)
        numbers[column.TOKEN, index] = tokens
        numbers[column.POSITION, index] = [chunk.start for chunk in chunks]
        numbers[column.SLOT, index] = [
            chunk.block_table[chunk.start // block_size] * block_size + chunk.start % block_size for chunk in chunks
        ]

    def fill_next(self, chunks: Sequence[Chunk], rows: Sequence[int], drawing_rows: Sequence[int]) -> None:
        """The rows of the step before, one position on, each with the token that its drawing row drew there."""
        numbers, index, block_size = self.rows.integer_mirror, np.asarray(rows, dtype=np.int64), self.pool.block_size
        moved = self.rows.follow_tables(chunks, rows)
        positions = numbers[column.POSITION, index] + 1
        slots = numbers[column.SLOT, index] + 1
        for place in {*moved, *np.flatnonzero(positions % block_size == 0).tolist()}:
            block, offset = divmod(int(positions[place]), block_size)
            slots[place] = chunks[place].block_table[block] * block_size + offset
        numbers[column.POSITION, index] = positions
        numbers[column.SLOT, index] = slots
        numbers[column.SOURCE, index] = drawing_rows
        numbers[column.OUTPUT_POSITION, index] += 1

    def list_work(self, shared: Sequence[SharedPrefix], rows: Sequence[int], size: int) -> bool:
        """Tells attention who reads what, once rows are filled; returns whether there are groups."""
        lengths = np.zeros(size, np.int64)
        index = np.asarray(rows, dtype=np.int64)
        lengths[index] = self.rows.integer_mirror[column.POSITION, index] + 1
        groups = [
            SharedPrefix(group.num_blocks, tuple(rows[chunk] for chunk in group.chunks))
            for group in shared
            if (len(group.chunks) - 1) * group.num_blocks * self.pool.block_size >= FEWEST_SHARED_POSITIONS
        ]
        self.attention.write_list(self.attention.work_list(lengths, groups))
        return bool(groups)

    # -- on the device ---------------------------------------------------------------------------------------

    def token_ids(self, size: int, drawn: Tensor) -> Tensor:
        """Each row's token (size,): as the host wrote it, or as it was drawn (max_rows,) in the last step."""
        numbers = self.rows.integers[:, :size]
        source = numbers[column.SOURCE]
        return torch.where(source >= 0, drawn[source.clamp_min(0)], numbers[column.TOKEN])

    def attend(self, layer: int, queries: Tensor, *, has_groups: bool) -> Tensor:
        """queries (R, heads, head_dim) of the first rows -> (R, heads * head_dim)."""
        out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        self.attention.attend(queries, self.pool.kv[layer], out, with_prefix=has_groups)
        return out
