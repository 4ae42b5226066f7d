"""In which form a packed weight multiplies so many rows: by the shapes alone, so that runs repeat.

Few rows are multiplied by warps, more by tiles, and many by cuBLAS after the weight was written out: whichever should
take the least time, guessed from what an H200 took for the products of a 3B shape. Another chip's numbers are others,
but they stand in about the same relation to each other.
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
WARPS = 12  # that a processor should have, of one program or of several: more to wait for memory with
AT_ONCE = 3  # programs of four warps and four tiles that a processor holds
FEWEST_WARPS, MOST_WARPS = 4, 16
WORDS_AHEAD = 80  # registers for what is on its way
ROW_BLOCKS = {64: 1.5, 128: 1.5, 256: 2.05}  # microseconds that a program of so many rows takes for 128 columns

# Microseconds.
WARPS_STEADY, TILES_STEADY, VENDOR_STEADY = 2.0, 3.0, 6.0
PASS = {4: 0.335e-6, 8: 0.49e-6}  # by warps, for a weight and up to MOST_ROWS rows
SHORT_PASS = {4: 0.25e-6, 8: 0.36e-6}  # up to half as many
WRITE = 0.8e-6  # to write a weight out
READ = 0.476e-6  # to read it again
MULTIPLY = 2 / 750e6  # for a weight and a row
PART = 8 / 4.3e6  # to write a number of float32 and read it again


def form_for(dtype: torch.dtype, rows: int, part: PackedPart, *, is_paired: bool, can_split: bool) -> PackedForm | None:
    """None: written out, and multiplied by cuBLAS. is_paired: gate and up by one kernel."""
    if not can_multiply(dtype, part):
        return None
    (outputs, columns), can_split = part.shape, can_split and not is_paired
    weights, passes = outputs * columns, -(-rows // MOST_ROWS)
    by_warps = WARPS_STEADY + passes * (SHORT_PASS if 2 * rows <= MOST_ROWS else PASS)[part.bits] * weights
    by_vendor = VENDOR_STEADY + weights * (WRITE + max(READ, MULTIPLY * rows))
    by_tiles, blocks = float("inf"), None
    if can_multiply_tiles(dtype, part):
        by_tiles, blocks = blocks_for(rows, outputs, columns, can_split=can_split)
    if by_warps <= min(by_vendor, by_tiles):
        own = outputs // 2 if is_paired else outputs
        return tiles_for(rows, own, columns, part.bits, is_paired=is_paired, can_split=can_split)
    return blocks if by_tiles <= by_vendor else None


def tiles_for(rows: int, outputs: int, columns: int, bits: int, *, is_paired: bool, can_split: bool) -> WarpTiles:
    """outputs: of gate and up, those of one."""
    blocks, groups, passes = -(-outputs // OUTPUTS), -(-columns // COLUMNS), -(-rows // MOST_ROWS)
    is_few, most, splits = rows <= FEW_ROWS, MOST_WARPS if rows <= FEW_ROWS else MOST_WARPS // 2, 1
    if is_paired:
        tiles = 2
        if rows == 1 and bits == 4 and -(-blocks // 2) <= AT_ONCE * PROCESSORS < blocks:
            tiles, most = 4, FEWEST_WARPS  # all programs at once
    else:
        tiles = 1 if is_few else 4 if columns > 2 * outputs or rows > 2 * FEW_ROWS else 2
    programs = -(-2 * blocks // tiles) if is_paired else -(-blocks // tiles)
    if can_split and not is_few:
        while splits < MOST_SPLITS and 3 * programs * splits <= 2 * PROCESSORS and groups >= 2 * splits * FEWEST_WARPS:
            splits *= 2
    # Of 8 bits fewer fit into registers, so more warps have fewer each.
    warps = 2 * FEWEST_WARPS if bits == 8 and is_paired and not is_few and groups >= 4 * FEWEST_WARPS else FEWEST_WARPS
    while warps < most and programs * passes * splits * warps < PROCESSORS * WARPS and 4 * warps * splits <= groups:
        warps *= 2
    ahead = WORDS_AHEAD // (tiles * (2 * bits + 2))
    return WarpTiles(tiles, warps, max(2, min(4, ahead)) if is_few else 8 // bits, splits)


def blocks_for(rows: int, outputs: int, columns: int, *, can_split: bool) -> tuple[float, RowBlocks]:
    """What should take the least time, and that; waves of programs over the processors counted."""
    groups, best, least = columns // COLUMNS, RowBlocks(64), float("inf")
    for row_tile, step in ROW_BLOCKS.items():
        splits = 1
        while splits <= (MOST_SPLITS if can_split else 1) and splits <= groups:
            programs = -(-outputs // TILED_OUTPUTS) * -(-rows // row_tile) * splits
            at_once = PROCESSORS * (2 if row_tile == 64 else 1)
            time = -(-programs // at_once) * (TILES_STEADY + -(-groups // splits) * step)
            if splits > 1:
                time += PART * splits * rows * outputs
            if time <= least:
                best, least = RowBlocks(row_tile, splits), time
            splits *= 2
    return least, best
