"""In which form a packed weight multiplies so many rows: by the shapes alone, so that runs repeat.

As they came out on an H200; what a rule may know of the chip is its number of processors, and by rule another chip gets
the same cuts.
"""

from __future__ import annotations

import torch

from ramify.gpu.kernels.packed_rows import MOST_ROWS, WarpTiles
from ramify.gpu.kernels.packed_tiles import OUTPUTS as TILED_OUTPUTS
from ramify.gpu.kernels.packed_tiles import RowBlocks, can_multiply_tiles
from ramify.gpu.kernels.packed_words import can_multiply
from ramify.gpu.packed_parts import COLUMNS, OUTPUTS, PackedPart
from ramify.gpu.product_forms import MOST_SPLITS, PROCESSORS

PackedForm = WarpTiles | RowBlocks

FEW_ROWS = 8  # one tile of a matrix instruction
MOST_BY_WARPS = 64  # rows, where tiles can multiply more; elsewhere twice as many
WARPS = 12  # that a processor should have, of one program or of several: more to wait for memory with
FEWEST_WARPS, MOST_WARPS = 4, 16
WORDS_AHEAD = 80  # registers for what is on its way

# Of tiles, in microseconds.
STEP = 0.09  # of 128 columns, beside
ROW_STEP = 0.0046  # for each row; the matrix units need as much
LEAST_STEP = 0.37  # to unpack a step's weights
STEADY = 3.0  # to begin and to end
PART_BYTES = 4.3e6  # a microsecond


def form_for(dtype: torch.dtype, rows: int, part: PackedPart, *, is_paired: bool, can_split: bool) -> PackedForm | None:
    """None: written out, and multiplied by cuBLAS. is_paired: gate and up by one kernel."""
    (outputs, columns), tiled = part.shape, can_multiply_tiles(dtype, part)
    if not can_multiply(dtype, part) or rows > MOST_BY_WARPS * (1 if tiled else 2):
        return blocks_for(rows, outputs, columns, can_split=can_split) if tiled else None
    if is_paired:
        return tiles_for(rows, outputs // 2, columns, part.bits, is_paired=True, can_split=False)
    return tiles_for(rows, outputs, columns, part.bits, is_paired=False, can_split=can_split)


def tiles_for(rows: int, outputs: int, columns: int, bits: int, *, is_paired: bool, can_split: bool) -> WarpTiles:
    """outputs: of gate and up, those of one."""
    tiles = (1 if rows <= FEW_ROWS else 2) * (2 if is_paired else 1)
    if rows > 2 * FEW_ROWS:
        tiles = 4
    own = tiles // 2 if is_paired else tiles
    programs = -(-outputs // (OUTPUTS * own)) * -(-rows // MOST_ROWS)
    groups = -(-columns // COLUMNS)
    splits = 1
    if can_split and rows > FEW_ROWS:
        while splits < MOST_SPLITS and 3 * programs * splits <= 2 * PROCESSORS and groups >= 2 * splits * FEWEST_WARPS:
            splits *= 2
    most = MOST_WARPS if rows <= FEW_ROWS else MOST_WARPS // 2
    warps = FEWEST_WARPS
    while warps < most and programs * splits * warps < PROCESSORS * WARPS and 2 * warps * splits <= groups:
        warps *= 2
    stages = max(1, min(4, WORDS_AHEAD // (tiles * (2 * bits + 2)))) if rows <= FEW_ROWS else 2
    return WarpTiles(tiles, warps, stages, splits)


def blocks_for(rows: int, outputs: int, columns: int, *, can_split: bool) -> RowBlocks:
    """What should take the least time, waves of programs over the processors counted."""
    groups, best, least = columns // COLUMNS, RowBlocks(64), float("inf")
    for row_tile in (64, 128, 256):
        splits = 1
        while splits <= (MOST_SPLITS if can_split else 1) and splits <= groups:
            programs = -(-outputs // TILED_OUTPUTS) * -(-rows // row_tile) * splits
            step = STEP + max(ROW_STEP * row_tile, LEAST_STEP)
            time = -(-programs // PROCESSORS) * (STEADY + -(-groups // splits) * step)
            if splits > 1:
                time += 8 * splits * rows * outputs / PART_BYTES
            if time < least:
                best, least = RowBlocks(row_tile, splits), time
            splits *= 2
    return best
