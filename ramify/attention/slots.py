"""Where a chunk's positions lie in the pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ramify.plan import Chunk

IntArray = npt.NDArray[np.int64]


def slots_of(chunk: Chunk, block_size: int, start: int) -> IntArray:
    """The slots of positions start..end of a chunk's track."""
    if chunk.end - start == 1:  # a decode: no arrays for one number
        block, offset = divmod(start, block_size)
        return np.array([chunk.block_table[block] * block_size + offset])
    first = start // block_size
    table = np.asarray(chunk.block_table[first:], dtype=np.int64)
    positions = np.arange(start - first * block_size, chunk.end - first * block_size)
    slots: IntArray = table[positions // block_size] * block_size + positions % block_size
    return slots
