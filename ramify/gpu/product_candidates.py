"""Which forms of a product are worth a measurement on a chip: a few that fit, the likeliest first.

What a time comes to is guessed from what must happen: the weight is read once from memory; every program reads its
tiles of weight and rows through the cache, at most as fast as what it has on its way allows; the matrix units multiply
padded rows; the busiest processor decides; parts are written and read once more. Measurements decide between the best
guesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from ramify.gpu.kernels.copied_product import ALIGNED, CopiedTiles
from ramify.gpu.kernels.row_product import RowTiles
from ramify.gpu.kernels.row_stream import RowStream
from ramify.gpu.kernels.tile_stream import TileStream
from ramify.gpu.kernels.tiled_product import MOST_ROWS, Tiles
from ramify.gpu.product_forms import MOST_SPLITS, Form, Product, Vendor

MOST_CANDIDATES = 4  # of ours, beside streams and cuBLAS

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
# (outputs, columns, warps, programs) of those that stay; stages are what fits. Outputs of gate and up are held twice.
ROW_STREAMS = ((8, 1024, 4, 2), (4, 1024, 4, 2), (8, 1024, 4, 3), (4, 1024, 4, 3))
MOST_STAGES = 12
# The same of several rows (outputs, columns, warps).
TILE_STREAMS = ((64, 128, 4), (64, 64, 4))
LARGE_COPIES = CopiedTiles(128, 128, 3, 4, rows=64)  # of gate and up: no guess, a tenth faster at 32 rows of 1.5B
MOST_ROWS_STREAMED = 64  # beyond, their addresses leave too few registers for sums
LARGEST_BOX = 256  # that the copy engine brings at a time, in either direction
RESERVED = 1024  # bytes of shared memory that every program takes for nothing
# (outputs, columns, warps); stages are what fits. Outputs of gate and up are held twice.
SHAPES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
GATE_UP_SHAPES = ((64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8), (128, 64, 8))
STAGES = (3, 4, 6)
SPLITS = (1, 2, 3, 4, 6, MOST_SPLITS)


@dataclass(frozen=True, slots=True)
class Chip:
    processors: int
    shared_memory: int  # bytes that one program may take, about all that its processor has
    is_hopper: bool = False  # has the matrix units and the copy engine that kernels which stay are written for

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        properties = torch.cuda.get_device_properties(device)
        memory = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        return cls(properties.multi_processor_count, memory, properties.major == 9)

    def holds(self, form: object, product: Product, rows: int) -> bool:
        """Whether a form can serve so many rows of a product here; one row has forms of its own."""
        itemsize = product.dtype.itemsize
        if isinstance(form, Tiles):
            needed = form.shared_memory(rows, itemsize, num_weights=product.tiled_weights)
            can_split = product.role in ("read", "added") or form.splits == 1
            fits = type(form) is Tiles or (self.is_hopper and product.columns % ALIGNED == 0)
            if isinstance(form, CopiedTiles):
                fits = fits and max(form.outputs, form.columns) <= LARGEST_BOX
            if isinstance(form, TileStream):
                chunks = -(-product.columns // form.columns)
                all_split = (form.splits - 1) * -(-chunks // form.splits) < chunks
                by_groups = form.warps % 4 == 0 and form.outputs % (16 * form.warps) == 0 and form.columns >= 64
                fits = fits and rows <= form.rows and all_split and by_groups and form.stages > 1
            return rows > 1 and can_split and fits and needed <= self.shared_memory
        if isinstance(form, RowStream):
            needed = form.shared_memory(product.columns, itemsize, num_weights=product.tiled_weights)
            can_stream = self.is_hopper and itemsize == 2 and product.columns % ALIGNED == 0 and form.stages > 1
            return rows == 1 and can_stream and needed <= self.shared_memory
        return isinstance(form, RowTiles) if rows == 1 else isinstance(form, Vendor)


@cache
def candidates(product: Product, rows: int, chip: Chip, stays: bool | None = None) -> list[Form]:
    """In float32 the matrix units would round the factors and without them we are no faster: cuBLAS's."""
    if rows == 1:
        streams = [] if stays is False else row_streams(product, chip)
        return [*([] if stays and streams else ROW_TILES), *streams]
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
    likely = [by_copies(tiles, product, rows, chip) for tiles in ours[:MOST_CANDIDATES]]
    large = [LARGE_COPIES] if product.role == "gate_up" and chip.holds(LARGE_COPIES, product, rows) else []
    return [*likely, *large, *tile_streams(product, rows, chip), Vendor()]


def by_copies(tiles: Tiles, product: Product, rows: int, chip: Chip) -> Tiles:
    """The same tiles, brought by the copy engine where there is one: it was never slower by more than a hundredth."""
    copied = CopiedTiles(**asdict(tiles))
    return copied if chip.holds(copied, product, rows) else tiles


def row_streams(product: Product, chip: Chip) -> list[Form]:
    """As many stages as leave room for as many programs, and for one of attention beside them."""
    found: list[Form] = []
    for outputs, columns, warps, programs in ROW_STREAMS:
        held = max(1, outputs // product.tiled_weights)
        room = chip.shared_memory // programs - RESERVED
        for stages in range(MOST_STAGES, 2, -1):
            form = RowStream(held, columns, stages, warps, programs)
            needed = form.shared_memory(product.columns, product.dtype.itemsize, num_weights=product.tiled_weights)
            if needed <= room and chip.holds(form, product, 1):
                found.append(form)
                break
    return found


def tile_streams(product: Product, rows: int, chip: Chip) -> list[Form]:
    """Two programs to a processor, columns split until all have something to do."""
    found: list[Form] = []
    for outputs, columns, warps in TILE_STREAMS if rows <= MOST_ROWS_STREAMED else ():
        splits, blocks = 1, -(-product.tiled_outputs // outputs)
        while product.role in ("read", "added") and splits < MOST_SPLITS and blocks * splits < chip.processors:
            splits *= 2
        for stages in range(MOST_STAGES, 2, -1):
            form = TileStream(outputs, columns, stages, warps, splits, 64, programs=2)
            needed = form.shared_memory(rows, product.dtype.itemsize, num_weights=product.tiled_weights)
            if 2 * (needed + RESERVED) <= chip.shared_memory and chip.holds(form, product, rows):
                found.append(form)
                break
    return found


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
