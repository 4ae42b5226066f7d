"""Rows times words of few bits by matrix instructions: what a warp adds up of 128 columns.

    left side    16 outputs by 16 columns, unpacked     (packed_words.py)
    right side   8 rows, the same columns: as they lie in memory, 8 columns of every 32 a thread

Sums of a block are in float32; times its scale they are added to the whole in float32.
"""

# ruff: noqa: RUF005 - the compiler knows no starred tuples

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ramify.gpu.kernels.packed_words import scale_of, unpacked

NORM_TEXTS = {
    torch.bfloat16: """{
.reg .b32 s, t, n;
.reg .f32 a, b;
shl.b32 s, $1, 16;
and.b32 t, $1, 0xFFFF0000;
mov.b32 a, s;
mov.b32 b, t;
mul.f32 a, a, $3;
mul.f32 b, b, $3;
cvt.rn.bf16x2.f32 t, b, a;
mov.b32 n, 0x80008000;
fma.rn.bf16x2 $0, t, $2, n;
}""",
    torch.float16: """{
.reg .b16 l, h;
.reg .b32 t;
.reg .f32 a, b;
mov.b32 {l, h}, $1;
cvt.f32.f16 a, l;
cvt.f32.f16 b, h;
mul.f32 a, a, $3;
mul.f32 b, b, $3;
cvt.rn.f16x2.f32 t, b, a;
mul.rn.f16x2 $0, t, $2;
}""",
}
PRODUCT_TEXT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_LOAD_INPUTS = gl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_INPUT_PAIR = gl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")
_FROM_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xFFFFFFFF;")


@gluon.jit
def load_inputs(pointer):  # type: ignore[no-untyped-def]
    """Four words of what another kernel wrote."""
    return gl.inline_asm_elementwise(_LOAD_INPUTS, "=r,=r,=r,=r,l", [pointer], (gl.int32,) * 4, is_pure=False, pack=1)


@gluon.jit
def load_input_pair(pointer):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(_LOAD_INPUT_PAIR, "=r,=r,l", [pointer], (gl.int32,) * 2, is_pure=False, pack=1)


@gluon.jit
def from_lane(word, lane):  # type: ignore[no-untyped-def]
    """The word of another thread of the warp."""
    return gl.inline_asm_elementwise(_FROM_LANE, "=r,r,r", [word, lane], gl.int32, is_pure=True, pack=1)


@gluon.jit
def normed(word, weight, scale, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two numbers of a row, normed and rounded as the norm's own kernel would write them."""
    return gl.inline_asm_elementwise(TEXT, "=&r,r,r,f", [word, weight, scale], gl.int32, is_pure=True, pack=1)


@gluon.jit
def multiply(left, inputs, other_inputs, sums, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """One matrix instruction: 16 outputs, 16 columns, 8 rows."""
    return gl.inline_asm_elementwise(
        TEXT,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [left[0], left[1], left[2], left[3], inputs, other_inputs, sums[0], sums[1], sums[2], sums[3]],
        (gl.float32,) * 4,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def read(inputs, column, columns, ROW_TILES: gl.constexpr, EVEN: gl.constexpr):  # type: ignore[no-untyped-def]
    """128 columns of every row: 4 words for each 32 columns."""
    held = ()
    for unit in gl.static_range(4):
        at = column + unit * 32
        if not EVEN:
            at = gl.minimum(at, columns - 32)  # past the end weights are zeros
        for tile in gl.static_range(ROW_TILES):
            held = held + load_inputs(inputs[tile] + at)
    return held


@gluon.jit
def own(lane, group, columns, EVEN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the four columns of 128 stand that a thread norms for its warp."""
    at = group * 128 + lane // 8 * 32
    if not EVEN:
        at = gl.minimum(at, columns - 32)
    return at + lane % 4 * 8 + lane // 4 % 2 * 4


@gluon.jit
def spread(pair, lane):  # type: ignore[no-untyped-def]
    """What each thread of a warp has normed -> 128 columns as `_read` has them."""
    held = ()
    for half in gl.static_range(8):
        source = lane % 4 + 4 * half
        held = held + (from_lane(pair[0], source), from_lane(pair[1], source))
    return held


@gluon.jit
def _multiply_all(left, inputs, STEP: gl.constexpr, parts, ROW_TILES: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    """parts += 16 columns of a tile times those of all rows."""
    grown = ()
    for row_tile in gl.static_range(ROW_TILES):
        grown = grown + multiply(
            left,
            inputs[(STEP // 2 * ROW_TILES + row_tile) * 4 + STEP % 2 * 2],
            inputs[(STEP // 2 * ROW_TILES + row_tile) * 4 + STEP % 2 * 2 + 1],
            (parts[row_tile * 4], parts[row_tile * 4 + 1], parts[row_tile * 4 + 2], parts[row_tile * 4 + 3]),
            PRODUCT,
        )
    return grown


@gluon.jit
def _add_block(  # type: ignore[no-untyped-def]
    sums,
    words,
    inputs,
    nothing,
    FIRST: gl.constexpr,
    FIRST_STEP: gl.constexpr,
    STEPS: gl.constexpr,
    SCALE_AT: gl.constexpr,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    ROW_TILES: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """sums += the products of a block's columns times its scale, for one tile of outputs."""
    scale, zero = scale_of(words, SCALE_AT, IS_FLOAT, SCALE)
    other_scale, other_zero = scale_of(words, SCALE_AT + 1, IS_FLOAT, SCALE)
    parts = ()
    for _ in gl.static_range(4 * ROW_TILES):
        parts = parts + (nothing,)
    for step in gl.static_range(STEPS):
        left = unpacked(words, FIRST, FIRST_STEP + step, zero, other_zero, BITS, UNPACK)
        parts = _multiply_all(left, inputs, FIRST_STEP + step, parts, ROW_TILES, PRODUCT)
    grown = ()
    for row_tile in gl.static_range(ROW_TILES):
        grown = grown + (
            sums[row_tile * 4] + parts[row_tile * 4] * scale,
            sums[row_tile * 4 + 1] + parts[row_tile * 4 + 1] * scale,
            sums[row_tile * 4 + 2] + parts[row_tile * 4 + 2] * other_scale,
            sums[row_tile * 4 + 3] + parts[row_tile * 4 + 3] * other_scale,
        )
    return grown


@gluon.jit
def add(  # type: ignore[no-untyped-def]
    totals,
    words,
    inputs,
    nothing,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    TILES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """totals += the products of 128 columns, for every tile of outputs and of rows."""
    per_tile: gl.constexpr = 2 * BITS
    steps: gl.constexpr = 8 // BLOCKS
    grown = ()
    for tile in gl.static_range(TILES):
        sums = ()
        for part in gl.static_range(4 * ROW_TILES):
            sums = sums + (totals[tile * ROW_TILES * 4 + part],)
        for block in gl.static_range(BLOCKS):
            sums = _add_block(
                sums, words, inputs, nothing, tile * per_tile, block * steps, steps,
                TILES * per_tile + (tile * BLOCKS + block) * 2,
                BITS, IS_FLOAT, ROW_TILES, UNPACK, SCALE, PRODUCT,
            )  # fmt: skip
        grown = grown + sums
    return grown
