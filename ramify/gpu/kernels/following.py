"""Beams go on from others that only the device knows yet: their block tables, and the block that each writes into.

Every row takes the table of the row that it goes on from, but for the block of its position, which is its own. Where
that block holds positions before this one, they are copied, in all layers. Rows may stand elsewhere than in the step
before, so tables are read by one kernel and written by the next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Numbers of each row that follows: where it stands, where the last choice noted its parent's row, the block of its
# position, which of its blocks that is, and whether it holds positions before this one.
ROW, SOURCE, BLOCK, INDEX, IS_INSIDE = (tl.constexpr(place) for place in range(5))
NUM_NUMBERS = 5
TABLE_PIECE = tl.constexpr(256)
COPIED_AT_ONCE = tl.constexpr(2048)  # numbers of a block


def follow(numbers: Tensor, parents: Tensor, tables: Tensor, scratch: Tensor, kv: Tensor, *, block_size: int) -> None:
    """numbers (NUM_NUMBERS, F) int64; parents (R,) int64; tables and scratch (max_rows, max_blocks) int32; kv (layers,
    slots, 2, kv_heads, head_dim)."""
    count, num_layers = numbers.shape[1], kv.shape[0]
    stride, block_numbers = tables.stride(0), block_size * kv.stride(1)
    _read_tables[(count,)](numbers, parents, tables, scratch, numbers.stride(0), stride, num_warps=1)
    _write[(count, num_layers)](
        numbers, scratch, tables, kv, numbers.stride(0), stride, kv.stride(0), block_numbers=block_numbers, num_warps=4
    )


@triton.jit
def _read_tables(
    numbers: tl.tensor,
    parents: tl.tensor,
    tables: tl.tensor,
    scratch: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
) -> None:
    follower = tl.program_id(0)
    parent = tl.load(parents + tl.load(numbers + SOURCE * stride + follower))
    end = tl.load(numbers + INDEX * stride + follower) + 1
    for first in range(0, end, TABLE_PIECE):
        places = first + tl.arange(0, TABLE_PIECE)
        blocks = tl.load(tables + parent * table_stride + places, mask=places < end, other=0)
        tl.store(scratch + follower * table_stride + places, blocks, mask=places < end)


@triton.jit
def _write(
    numbers: tl.tensor,
    scratch: tl.tensor,
    tables: tl.tensor,
    kv: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    layer_stride: tl.tensor,
    block_numbers: tl.constexpr,
) -> None:
    follower, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, block = tl.load(numbers + ROW * stride + follower), tl.load(numbers + BLOCK * stride + follower)
    index = tl.load(numbers + INDEX * stride + follower)
    if layer == 0:
        for first in range(0, index + 1, TABLE_PIECE):
            places = first + tl.arange(0, TABLE_PIECE)
            held = tl.load(scratch + follower * table_stride + places, mask=places < index, other=0)
            held = tl.where(places < index, held, block.to(tl.int32))
            tl.store(tables + row * table_stride + places, held, mask=places <= index)
    source = tl.load(scratch + follower * table_stride + index).to(tl.int64)
    if (tl.load(numbers + IS_INSIDE * stride + follower) > 0) & (source != block):
        kv += layer * layer_stride
        for first in range(0, block_numbers, COPIED_AT_ONCE):
            places = first + tl.arange(0, COPIED_AT_ONCE)
            held = tl.load(kv + source * block_numbers + places, mask=places < block_numbers)
            tl.store(kv + block * block_numbers + places, held, mask=places < block_numbers)
