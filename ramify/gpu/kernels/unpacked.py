"""A weight of few bits written out as numbers, for products of many rows: those are the matrix units' own work.

    words (tiles of outputs, tiles of columns, loads, 32, 4)    ->    weight (outputs, depth)

A program writes 16 outputs by 128 columns, a tile (packed_parts.py). Numbers are (number - zero) * scale in float32,
rounded once to what is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.packed_parts import COLUMNS, OUTPUTS, PackedPart

WARPS = 4


def unpack(part: PackedPart, first_tile: int, out: Tensor) -> None:
    """The outputs from 16 * first_tile on -> out (outputs, depth), in the order in which columns are held."""
    outputs, depth = out.shape
    groups = part.numbers.shape[1]
    _unpack[(triton.cdiv(outputs, OUTPUTS), groups)](
        part.numbers,
        part.scales,
        out,
        first_tile,
        outputs,
        depth,
        BITS=part.bits,
        IS_FLOAT=part.is_float,
        BLOCKS=part.blocks,
        OUTPUTS=OUTPUTS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


@triton.jit
def _e4m3(number):  # type: ignore[no-untyped-def]
    """An e4m3 number's bits as float32: moved to where float32 has them they are that number times 2^-120."""
    bits = (number & 0x80) << 24 | (number & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    numbers,
    scales,
    out,
    first_tile,
    outputs,
    depth,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.arange(0, OUTPUTS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    p, g = row // 8, row % 8
    u, q, s, r, h = column // 32, column // 8 % 4, column // 4 % 2, column // 2 % 2, column % 2
    place = ((first_tile + tile) * tl.num_programs(1) + group).to(tl.int64)
    thread = (4 * g + q) * 4
    if BITS == 4:
        word = u // 2 * 128 + thread + u % 2 * 2 + s
        number = tl.load(numbers + place * 256 + word) >> (16 * h + 8 * r + 4 * p) & 15
    else:
        word = u * 128 + thread + s * 2 + r
        number = tl.load(numbers + place * 512 + word) >> (16 * h + 8 * p) & 255
    scale = tl.load(scales + place * (BLOCKS * 16) + column // (COLUMNS // BLOCKS) * 16 + g * 2 + p)
    if IS_FLOAT:
        weight = _e4m3(number) * scale.to(tl.float32, bitcast=True)
    else:
        half = (scale & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        weight = (number - (scale >> 16)).to(tl.float32) * half
    at = group * COLUMNS + column
    output = tile * OUTPUTS + row
    target = out + output.to(tl.int64) * depth + at
    tl.store(target, weight.to(out.dtype.element_ty), mask=(output < outputs) & (at < depth))
