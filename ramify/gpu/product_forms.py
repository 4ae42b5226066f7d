"""In which form a product of a weight is computed: cuBLAS, or a kernel of ours and its tiles.

`Forms` chooses by the number of rows. Here are the choices that need no measurement: one by rule, for wherever nothing
can be timed, and one that is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ramify.gpu.kernels.row_product import RowTiles
from ramify.gpu.kernels.row_stream import RowStream
from ramify.gpu.kernels.tiled_product import Tiles

# What is done with a product: read as it comes (queries, keys and values), added to the residual stream, made into
# silu(gate) * up, or drawn from.
Role = Literal["read", "added", "gate_up", "head"]

# As timed on an H200 for the shapes of 1.5B and 3B models, 1 to 64 rows.
ROW_TILES = RowTiles(outputs=2, columns=1024, warps=4)
ROW_GATE_UP_TILES = RowTiles(outputs=4, columns=256, warps=1, stages=4)
ROW_HEAD_TILES = RowTiles(outputs=8, columns=256, warps=1, stages=3)
FEW_ROWS_TILES = Tiles(outputs=64, columns=128, stages=4, warps=4)
FEW_ROWS_GATE_UP_TILES = Tiles(outputs=64, columns=64, stages=4, warps=4)
# At 2 rows the tiles above took a sixth longer than at 8 for gate and up, these did not.
VERY_FEW_ROWS = 4
VERY_FEW_ROWS_TILES = Tiles(outputs=128, columns=64, stages=4, warps=8)

MOST_ROWS = 64  # that are ours by rule: beyond, the matrix units bind, not the memory
PROCESSORS = 132  # of an H200; by rule another chip gets the same cuts, and with them the same results
MOST_SPLITS = 8  # each costs whoever adds the parts up 0.15 us
LEAST_SHARED_MEMORY = 96 * 1024  # bytes that a program may take on the smallest chips
MIB = 2**20
ALWAYS, NEVER = 1, 2**20  # MiB of a weight: what any weight of a real model has, and what none has


@dataclass(frozen=True, slots=True)
class Vendor:
    """cuBLAS, as torch calls it."""


OneRowForm = RowTiles | RowStream
Form = Vendor | Tiles | OneRowForm


@dataclass(frozen=True, slots=True)
class Product:
    """A weight (outputs, columns) and what becomes of its products."""

    role: Role
    outputs: int
    columns: int
    dtype: torch.dtype
    note: str = ""  # on which of its forms are meant

    @property
    def name(self) -> str:
        return f"{self.role} {self.outputs}x{self.columns} {str(self.dtype).removeprefix('torch.')}{self.note}"

    @property
    def num_bytes(self) -> int:
        return self.outputs * self.columns * self.dtype.itemsize

    @property
    def tiled_weights(self) -> int:
        """How many tiles of the weight a program holds at a time."""
        return 2 if self.role == "gate_up" else 1

    @property
    def tiled_outputs(self) -> int:
        """The outputs that programs share out among them."""
        return self.outputs // self.tiled_weights


@dataclass(frozen=True, slots=True)
class Pace:
    """How the kernels of a forward pass follow each other; 0 or 1, as a file holds it.

    overlaps: each starts while the one before it ends (kernels/overlap.py). stays_from: one row's products of weights
    of so many MiB and more are made by few programs that stay (kernels/row_stream.py), not by thousands. reads_early:
    attention asks for keys and values before the kernel before it has ended (kernels/early_decode.py). asks_ahead: so
    many MiB of gate and up are asked for while attention is at work (kernels/ahead.py).
    """

    overlaps: int
    stays_from: int = NEVER
    reads_early: int = 0
    asks_ahead: int = 0

    @property
    def is_proven(self) -> bool:
        """Whether everything that it launches has run on a GPU, and not in the interpreter alone."""
        return not (self.reads_early or self.asks_ahead)

    def stays(self, weight: Tensor) -> bool:
        return weight.numel() * weight.itemsize >= self.stays_from * MIB


class Forms(Protocol):
    def of(self, rows: int, *, stays: bool | None = None) -> Form:
        """The form for so many rows, always the same. RowTiles and RowStreams serve one row, Tiles any number.

        stays: of one row, whether it must be the one or the other; either, if it is not said.
        """


@dataclass(frozen=True, slots=True)
class OneForm:
    """Whatever the number of rows."""

    form: Form

    def of(self, rows: int, *, stays: bool | None = None) -> Form:  # noqa: ARG002
        return self.form


@dataclass(frozen=True, slots=True)
class FormsByRule:
    """By the shape alone.

    In float32 the matrix units would round the factors and without them we are no faster, so several rows are cuBLAS's,
    except where kernels are interpreted: that is where they are proven.
    """

    product: Product
    shared_memory: int
    is_interpreted: bool

    def of(self, rows: int, *, stays: bool | None = None) -> Form:  # noqa: ARG002
        product = self.product
        if rows == 1:
            return {"gate_up": ROW_GATE_UP_TILES, "head": ROW_HEAD_TILES}.get(product.role, ROW_TILES)
        if rows > MOST_ROWS or not (self.is_interpreted or product.dtype.itemsize == 2):
            return Vendor()
        if product.role == "gate_up":
            tiles = VERY_FEW_ROWS_TILES if rows <= VERY_FEW_ROWS else FEW_ROWS_GATE_UP_TILES
            return fitting(tiles, rows, self.shared_memory, num_weights=2)
        if product.role == "head":  # many programs one after the other, so there is room for two on any processor
            tiles = VERY_FEW_ROWS_TILES if rows <= VERY_FEW_ROWS else FEW_ROWS_TILES
            return fitting(tiles, rows, LEAST_SHARED_MEMORY)
        return tiles_for(rows, product.outputs, product.columns, self.shared_memory)


def tiles_for(rows: int, outputs: int, columns: int, shared_memory: int = LEAST_SHARED_MEMORY) -> Tiles:
    """Columns are split while every program has a processor to itself and more than a tile to walk.

    24 such programs read 1.25 TB/s, so 80 can ask for all that the memory gives; each further part is only more for its
    reader to add up.
    """
    tiles = fitting(FEW_ROWS_TILES, rows, shared_memory)
    splits, blocks = 1, -(-outputs // tiles.outputs)
    while splits < MOST_SPLITS and 2 * splits * blocks <= PROCESSORS and columns // (2 * splits) >= tiles.columns:
        splits *= 2
    return replace(tiles, splits=splits)


def fitting(tiles: Tiles, rows: int, shared_memory: int, *, num_weights: int = 1) -> Tiles:
    """With as many stages as shared memory holds, in 16 bits."""
    stage = replace(tiles, stages=1).shared_memory(rows, 2, num_weights=num_weights)
    return replace(tiles, stages=min(tiles.stages, shared_memory // stage))
