"""Which forms of a product are worth a measurement on a chip: a few that fit, the likeliest first.

What a time comes to is guessed from what must happen: the weight is read once from memory; every program reads its
tiles of weight and rows through the cache, at most as fast as what it has on its way allows; the matrix units multiply
padded rows; the busiest processor decides; parts are written and read once more. Measurements decide between the best
guesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from ramify.gpu.kernels.row_product import RowTiles
from ramify.gpu.kernels.tiled_product import MOST_ROWS, Tiles
from ramify.gpu.product_forms import MOST_SPLITS, Form, Product, Vendor

MOST_CANDIDATES = 4  # of ours, beside cuBLAS

# Of a Hopper. Another chip's are other numbers, but they stand in about the same relation to each other.
MEMORY = 4.3e12  # bytes a second
CACHE = 6.5e12
LATENCY = 0.9e-6  # seconds from asking for a tile to having it
PROCESSOR = 90e9  # bytes a second through one processor
MULTIPLY = 6.0e12 * 0.8  # operations a second of one processor's matrix units
STEADY = 2e-6  # seconds to start and to end
REGISTERS = 65536

ROW_TILES = (
    RowTiles(2, 1024, 4),
    RowTiles(4, 1024, 4, 3),
    RowTiles(4, 256, 1, 4),
    RowTiles(8, 256, 1, 3),
)
# (outputs, columns, warps); stages are what fits. Outputs of gate and up are held twice.
SHAPES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
GATE_UP_SHAPES = ((64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8), (128, 64, 8))
STAGES = (3, 4, 6)
SPLITS = (1, 2, 3, 4, 6, MOST_SPLITS)


@dataclass(frozen=True, slots=True)
class Chip:
    processors: int
    shared_memory: int  # bytes that one program may take, about all that its processor has

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        properties = torch.cuda.get_device_properties(device)
        memory = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        return cls(properties.multi_processor_count, memory)

    def holds(self, form: Form, product: Product, rows: int) -> bool:
        """Whether a form can serve so many rows of a product here; one row has forms of its own."""
        if isinstance(form, Tiles):
            needed = form.shared_memory(rows, product.dtype.itemsize, num_weights=product.tiled_weights)
            can_split = product.role in ("read", "added") or form.splits == 1
            return rows > 1 and can_split and needed <= self.shared_memory
        return (rows == 1) == isinstance(form, RowTiles)


@cache
def candidates(product: Product, rows: int, chip: Chip) -> list[Form]:
    """In float32 the matrix units would round the factors and without them we are no faster: cuBLAS's."""
    if rows == 1:
        return list(ROW_TILES)
    if product.dtype.itemsize != 2:
        return [Vendor()]
    guessed = sorted(
        ((guess(product, rows, tiles, chip), index, tiles) for index, tiles in enumerate(_all(product, rows, chip))),
    )
    ours: list[Tiles] = []
    for _, _, tiles in guessed:
        # Forms that differ in stages alone are nearly the same: another one tells more.
        if all(replace(tiles, stages=other.stages) != other for other in ours):
            ours.append(tiles)
    return [*ours[:MOST_CANDIDATES], Vendor()]


def guess(product: Product, rows: int, tiles: Tiles, chip: Chip) -> float:
    """Seconds that a product in tiles may take, with the reading of its parts."""
    itemsize, held = product.dtype.itemsize, product.tiled_weights * tiles.outputs
    row_tile = tiles.rows_of(rows)
    blocks = -(-product.tiled_outputs // tiles.outputs) * -(-rows // row_tile)
    programs = blocks * tiles.splits
    columns = -(-product.columns // tiles.columns // tiles.splits) * tiles.columns
    memory = tiles.shared_memory(rows, itemsize, num_weights=product.tiled_weights)
    registers = 32 * tiles.warps * (64 + held * row_tile // (32 * tiles.warps))
    together = max(1, min(chip.shared_memory // memory, REGISTERS // registers))
    busiest = -(-programs // chip.processors)
    own_bytes = itemsize * columns * (held + row_tile)
    on_the_way = min(together, busiest) * memory * (tiles.stages - 1) / tiles.stages
    speed = min(PROCESSOR, on_the_way / LATENCY)
    work = max(
        product.num_bytes / MEMORY,
        programs * own_bytes / CACHE,
        busiest * own_bytes / speed,
        busiest * 2 * columns * held * row_tile / MULTIPLY,
    )
    parts = 0.0 if tiles.splits == 1 else tiles.splits * (8 * rows * product.outputs / MEMORY + 0.15e-6)
    return STEADY + work + parts


def _all(product: Product, rows: int, chip: Chip) -> Iterator[Tiles]:
    """Every form in tiles that the chip holds."""
    for outputs, columns, warps in GATE_UP_SHAPES if product.role == "gate_up" else SHAPES:
        for row_tile in (64, 128, MOST_ROWS):
            if row_tile > 64 and row_tile // 2 >= rows:
                continue  # the same tile again
            for stages in STAGES:
                tiles = Tiles(outputs, columns, stages, warps, rows=row_tile)
                for splits in SPLITS:
                    form = replace(tiles, splits=splits)
                    if columns * splits <= max(product.columns, columns) and chip.holds(form, product, rows):
                        yield form
