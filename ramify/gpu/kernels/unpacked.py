"""A weight of few bits written out as numbers, for products of many rows: those are the matrix units' own work.

    words (tiles of outputs, tiles of columns, loads, 32, 4)    ->    weight (outputs, depth)

Numbers are (number - zero) * scale in float32, rounded once to what is asked for. In 16 bits a warp writes a tile of 16
outputs by 128 columns, unpacked as the product of few rows unpacks it; each thread has 8 columns in a row to write. In
float32, and where kernels are interpreted, another kernel finds every number for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ramify.gpu.kernels.packed_words import ask, can_multiply, scale_of, scaled, texts_of, unpacked
from ramify.gpu.packed_parts import COLUMNS, OUTPUTS, PackedPart

WARPS = 4
_STORE = gl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $6, 0;
@p st.global.v4.b32 [$1], {$2, $3, $4, $5};
mov.b32 $0, 0;
}""")


def unpack(part: PackedPart, first_tile: int, out: Tensor) -> None:
    """The outputs from 16 * first_tile on -> out (outputs, depth), in the order in which columns are held."""
    if can_multiply(out.dtype, part):
        write_out(part, first_tile, out)
        return
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


def write_out(part: PackedPart, first_tile: int, out: Tensor) -> None:
    """As `unpack`, in 16 bits, on a GPU that has the instructions."""
    outputs, depth = out.shape
    assert out.is_contiguous(), "rows lie one after the other"
    groups, texts = part.numbers.shape[1], texts_of(part, out.dtype)
    _write_out[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(groups, WARPS))](
        part.numbers,
        part.scales,
        out,
        first_tile,
        outputs,
        depth,
        groups,
        BITS=part.bits,
        IS_FLOAT=part.is_float,
        BLOCKS=part.blocks,
        UNIT=texts.unit,
        UNPACK=texts.unpack,
        SCALE=texts.scale,
        ROUND=texts.round,
        num_warps=WARPS,
    )


@gluon.jit
def store_words(pointer, first, second, third, fourth, inside):  # type: ignore[no-untyped-def]
    words = [pointer, first, second, third, fourth, inside]
    gl.inline_asm_elementwise(_STORE, "=r,l,r,r,r,r,r", words, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _write_out(  # type: ignore[no-untyped-def]
    numbers,
    scales,
    out,
    first_tile,
    outputs,
    depth,
    groups,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    UNIT: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    ROUND: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    CHUNKS: gl.constexpr = BITS // 2
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    lane = thread % 32
    group = gl.program_id(1) * WARPS + thread // 32
    tile = gl.program_id(0)
    start = (first_tile + tile).to(gl.int64) * groups
    words = ask(
        (numbers + start * (CHUNKS * 128) + lane * 4,), (scales + start * (BLOCKS * 16) + lane // 4 * 2,),
        group, groups, True, 1, CHUNKS, BLOCKS,
    )  # fmt: skip
    output = tile * 16 + lane // 4
    column = group * 128 + lane % 4 * 8
    target = out + output.to(gl.int64) * depth + column
    other_target = target + depth * 8
    inside = ((group < groups) & (output < outputs)).to(gl.int32)
    other_inside = ((group < groups) & (output + 8 < outputs)).to(gl.int32)
    for unit in gl.static_range(4):
        scale, zero = scale_of(words, 2 * BITS + unit * BLOCKS // 4 * 2, IS_FLOAT, SCALE)
        other_scale, other_zero = scale_of(words, 2 * BITS + unit * BLOCKS // 4 * 2 + 1, IS_FLOAT, SCALE)
        first = unpacked(words, 0, 2 * unit, zero, other_zero, BITS, UNPACK)
        last = unpacked(words, 0, 2 * unit + 1, zero, other_zero, BITS, UNPACK)
        is_there = (column + unit * 32 < depth).to(gl.int32)
        store_words(
            target + unit * 32,
            scaled(first[0], scale * UNIT, ROUND), scaled(first[2], scale * UNIT, ROUND),
            scaled(last[0], scale * UNIT, ROUND), scaled(last[2], scale * UNIT, ROUND),
            inside & is_there,
        )  # fmt: skip
        store_words(
            other_target + unit * 32,
            scaled(first[1], other_scale * UNIT, ROUND), scaled(first[3], other_scale * UNIT, ROUND),
            scaled(last[1], other_scale * UNIT, ROUND), scaled(last[3], other_scale * UNIT, ROUND),
            other_inside & is_there,
        )  # fmt: skip


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
