"""How many rows a packed weight multiplies itself, and in which tiles: by the shape and the number of rows alone.

So runs repeat. What a rule may know of the chip is its number of processors; by rule another chip gets the same cuts.
"""

from __future__ import annotations

from ramify.gpu.kernels.packed_rows import MOST_ROWS, ROWS, WarpTiles
from ramify.gpu.packed_parts import COLUMNS, OUTPUTS
from ramify.gpu.product_forms import MOST_SPLITS, PROCESSORS

WARPS = 16  # that a processor should have, of one program or of several: more to wait for memory with
FEWEST_WARPS, MOST_WARPS = 4, 16
WORDS_AHEAD = 80  # registers for what is on its way
FEW_ROWS = 8


def tiles_for(rows: int, outputs: int, columns: int, bits: int, *, is_paired: bool, can_split: bool) -> WarpTiles:
    """outputs: of gate and up, those of one."""
    tiles = (1 if rows <= FEW_ROWS else 2) * (2 if is_paired else 1)
    if (rows > 2 * ROWS and not is_paired) or rows > 2 * ROWS:
        tiles = 4
    own = tiles // 2 if is_paired else tiles
    programs = -(-outputs // (OUTPUTS * own)) * -(-rows // MOST_ROWS)
    groups = -(-columns // COLUMNS)
    most = MOST_WARPS if rows <= FEW_ROWS else 8
    splits = 1
    if can_split and rows > FEW_ROWS:
        while (
            splits < MOST_SPLITS and programs * splits * 3 <= PROCESSORS * 2 and groups // (2 * splits) >= FEWEST_WARPS
        ):
            splits *= 2
    warps = FEWEST_WARPS
    while warps < most and programs * splits * warps < PROCESSORS * WARPS * 3 // 4 and 2 * warps * splits <= groups:
        warps *= 2
    stages = max(1, min(4, WORDS_AHEAD // (tiles * (2 * bits + 2)))) if rows <= FEW_ROWS else 2
    return WarpTiles(tiles, warps, stages, splits)
