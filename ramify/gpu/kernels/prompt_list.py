"""What the attention of prompts does in one step: a list of tiles of queries, as the device reads it.

    chunk     rows of one prompt, one position each           |-- tile --|-- tile --|- tile -|
    tile      ROWS of them, all query heads of one key-value head, seen from position 0 to its last row's own

    the list, one flat int32 array
    | number of tiles | where blocks begin | 0 | 0 | tiles: TABLE, ROW, NUM_ROWS, POSITION | blocks, chunk by chunk |

The longest walks come first: programs take tiles in turns, to and fro, and so have equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ramify.device.reads import Int64s, Reads

Int32s = NDArray[np.int32]

HEADER = 4
TILE_FIELDS = 4


def build_prompt_list(reads: Reads, *, rows_of_a_tile: int) -> Int32s:
    """The pieces of prompts among a step's chunks; `rows_of_a_tile` rows of one are computed together."""
    chosen = np.flatnonzero(reads.num_rows > 1)
    num_rows, first_rows = reads.num_rows[chosen], reads.first_rows[chosen]
    positions = reads.ends[chosen] - 1  # of each chunk's first row
    num_blocks: Int64s = -(-(positions + num_rows) // reads.block_size)
    tables = [reads.tables[chunk] for chunk in chosen.tolist()]
    counts = -(-num_rows // rows_of_a_tile)
    owner = np.repeat(np.arange(len(chosen)), counts)
    start = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * rows_of_a_tile
    tiles = np.empty((len(owner), TILE_FIELDS), np.int32)
    tiles[:, 0] = (np.cumsum(num_blocks) - num_blocks)[owner]
    tiles[:, 1] = first_rows[owner] + start
    tiles[:, 2] = np.minimum(num_rows[owner] - start, rows_of_a_tile)
    tiles[:, 3] = positions[owner] + start
    longest_first = np.argsort(-tiles[:, 3], kind="stable")
    blocks = _joined(tables, num_blocks)
    packed = np.zeros(HEADER + tiles.size + len(blocks), np.int32)
    packed[:2] = len(tiles), HEADER + tiles.size
    packed[HEADER : HEADER + tiles.size] = tiles[longest_first].reshape(-1)
    packed[HEADER + tiles.size :] = blocks
    return packed


def longest_list(max_rows: int, max_chunks: int, max_blocks: int) -> int:
    """Numbers of any list of so many rows in so many chunks, each of at most so many blocks."""
    return HEADER + TILE_FIELDS * max_rows + max_chunks * max_blocks


def _joined(tables: Sequence[Sequence[int]], num_blocks: Int64s) -> Int32s:
    """The leading blocks of each table, table by table."""
    parts = (table[:count] for table, count in zip(tables, num_blocks.tolist(), strict=True))
    return np.fromiter(chain.from_iterable(parts), np.int32, int(num_blocks.sum()))
