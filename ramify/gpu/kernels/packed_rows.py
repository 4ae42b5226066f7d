"""Up to a few dozen rows times a weight of few bits: matrix instructions fed from registers, written down one by one.

    numbers      in memory as threads hold them (packed_parts.py): a load of 16 bytes a thread, and nothing is moved
    unpacking    9 instructions for 8 weights of 4 bits
    sums         of a block in float32, times its scale, added to the whole in float32

A program takes some tiles of 16 outputs. Its warps share out the columns, 128 at a time, and add their sums up in
shared memory at the end. Weights are asked for some turns ahead, the first ones before the preceding kernel has ended.
Around the product it does what `row_product` does: the norm of one row before it, after it a bias, the residual or
silu(gate) * up.

Bits become numbers without a conversion. As bits of a bfloat16 (float16) they are that whole number times the smallest
one, 2^-133 (2^-24); one multiplication brings it back among ordinary numbers, and subtracts the zero in the same
instruction. Exact, since it has at most 8 bits.

Gluon, Triton's lower language: every tensor here has one element for each thread, and tuples of them are its registers.
"""

# ruff: noqa: RUF005 - the compiler knows no starred tuples

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.packed_parts import OUTPUTS, PackedPart

MOST_TURNS = 8
ROWS = 8  # of a matrix instruction
MOST_ROWS = 32  # of a program


@dataclass(frozen=True, slots=True)
class WarpTiles:
    """tiles: of 16 outputs, of a program; of gate and up, half are of each. stages: turns asked for ahead."""

    tiles: int
    warps: int
    stages: int
    splits: int = 1


# Two numbers a register, low half first. `zero` is minus the zero point, in both halves, in the same unit.
_NIBBLES = """{{
.reg .b32 a, b, c, d, s, l, h;
mov.b32 l, {low};
mov.b32 h, {high};
and.b32 a, $4, 0x000F000F;
and.b32 b, $4, 0x00F000F0;
shr.u32 s, $4, 8;
and.b32 c, s, 0x000F000F;
and.b32 d, s, 0x00F000F0;
fma.rn.{number} $0, a, l, $5;
fma.rn.{number} $1, b, h, $6;
fma.rn.{number} $2, c, l, $5;
fma.rn.{number} $3, d, h, $6;
}}"""
_OCTETS = """{{
.reg .b32 a, b, s, l;
mov.b32 l, {low};
and.b32 a, $2, 0x00FF00FF;
shr.u32 s, $2, 8;
and.b32 b, s, 0x00FF00FF;
fma.rn.{number} $0, a, l, $3;
fma.rn.{number} $1, b, l, $4;
}}"""
_FLOATS = """{{
.reg .b32 a, b, s, t, m, n;
mov.b32 m, {low};
mov.b32 n, 0x80008000;
shl.b32 s, $2, 8;
{shift_low}
and.b32 t, t, {mask};
and.b32 s, s, 0x80008000;
or.b32 a, s, t;
{shift_high}
and.b32 t, t, {mask};
and.b32 s, $2, 0x80008000;
or.b32 b, s, t;
fma.rn.{number} $0, a, m, n;
fma.rn.{number} $1, b, m, n;
}}"""
# The scale, and minus the zero point in both halves.
_SCALE = """{{
.reg .b16 l, h;
.reg .b32 z, m, n;
mov.b32 {{l, h}}, $2;
cvt.f32.f16 $0, l;
mov.b32 z, {{h, h}};
mov.b32 m, {minus};
mov.b32 n, 0x80008000;
fma.rn.{number} $1, z, m, n;
}}"""
_NORM = {
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
# Two numbers times a float32.
_ROUND = {
    torch.bfloat16: """{
.reg .b32 s, t;
.reg .f32 a, b;
shl.b32 s, $1, 16;
and.b32 t, $1, 0xFFFF0000;
mov.b32 a, s;
mov.b32 b, t;
mul.f32 a, a, $2;
mul.f32 b, b, $2;
cvt.rn.bf16x2.f32 $0, b, a;
}""",
    torch.float16: """{
.reg .b16 l, h;
.reg .f32 a, b;
mov.b32 {l, h}, $1;
cvt.f32.f16 a, l;
cvt.f32.f16 b, h;
mul.f32 a, a, $2;
mul.f32 b, b, $2;
cvt.rn.f16x2.f32 $0, b, a;
}""",
}
_PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_FIELDS = {
    torch.bfloat16: {
        "number": "bf16x2",
        "low": "0x7F007F00",  # 2^127
        "high": "0x7D007D00",  # 2^123
        "minus": "0xFF00FF00",
    },
    torch.float16: {"number": "f16x2", "low": "0x78007800", "high": "0x68006800", "minus": "0xF800F800"},  # 2^15, 2^11
}
# An e4m3 number's bits, moved to where the dtype has them, are that number times 2^-120 (2^-8).
_FLOAT_FIELDS = {
    torch.bfloat16: {
        "number": "bf16x2",
        "low": "0x7B807B80",
        "mask": "0x07F007F0",
        "shift_low": "shl.b32 t, $2, 4;",
        "shift_high": "shr.u32 t, $2, 4;",
    },
    torch.float16: {
        "number": "f16x2",
        "low": "0x5C005C00",
        "mask": "0x3F803F80",
        "shift_low": "shl.b32 t, $2, 7;",
        "shift_high": "shr.u32 t, $2, 1;",
    },
}
# What integers come in, after the multiplication: 2^-133 * 2^127, 2^-24 * 2^15.
_UNIT = {torch.bfloat16: 2.0**6, torch.float16: 2.0**9}


@dataclass(frozen=True, slots=True)
class Texts:
    """The instructions of one format in one precision."""

    unpack: str
    scale: str
    round: str
    unit: float


def texts_of(part: PackedPart, dtype: torch.dtype) -> Texts:
    if part.is_float:
        return Texts(_FLOATS.format(**_FLOAT_FIELDS[dtype]), "", _ROUND[dtype], 1.0)
    fields = _FIELDS[dtype]
    unpack = _NIBBLES if part.bits == 4 else _OCTETS
    return Texts(unpack.format(**fields), _SCALE.format(**fields), _ROUND[dtype], _UNIT[dtype])


def packed_rows(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: WarpTiles,
    *,
    first_output: int = 0,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    adds: bool = False,
    overlap: bool = False,
) -> None:
    """x (rows, columns) in the order of the part's columns -> out (splits, rows, all outputs), from first_output on.

    Several splits are float32, and whoever reads them adds them up. One may be of any precision, and have the bias
    (outputs,) in it already; adds: onto what is there. A norm is that of one row.
    """
    assert out.shape[0] == tiles.splits, "one part a split"
    assert tiles.splits == 1 or (bias is None and not adds), "parts are added up by their reader"
    _launch(x, part, out, tiles, part.shape[0], first_output, bias, norm, adds=adds, is_paired=False, overlap=overlap)


def packed_gate_up(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: WarpTiles,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    overlap: bool = False,
) -> None:
    """x (rows, columns), a part of gate and up, gate first -> out (rows, inner): silu(gate) * up."""
    assert part.shape[0] == 2 * out.shape[1], "gate and up are of one size"
    assert tiles.splits == 1, "silu needs the whole sum"
    _launch(x, part, out[None], tiles, out.shape[1], 0, bias, norm, adds=False, is_paired=True, overlap=overlap)


def can_multiply(dtype: torch.dtype, part: PackedPart) -> bool:
    """Whether the part's device has the instructions for it, and it the sizes."""
    device = part.numbers.device
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_able and dtype.itemsize == 2 and not part.shape[1] % 32


def _launch(
    x: Tensor,
    part: PackedPart,
    out: Tensor,
    tiles: WarpTiles,
    outputs: int,
    first_output: int,
    bias: Tensor | None,
    norm: Norm | None,
    *,
    adds: bool,
    is_paired: bool,
    overlap: bool,
) -> None:
    (rows, columns), texts = x.shape, texts_of(part, x.dtype)
    assert columns == part.shape[1], "x has the weight's columns"
    assert x.is_contiguous(), "rows of x lie one after the other"
    assert out.is_contiguous(), "and those of the product"
    assert norm is None or rows == 1, "a norm is that of one row"
    row_tiles = min(MOST_ROWS // ROWS, triton.next_power_of_2(triton.cdiv(rows, ROWS)))
    own_tiles = tiles.tiles // 2 if is_paired else tiles.tiles
    per_split = triton.cdiv(part.numbers.shape[1], tiles.splits)
    turns = triton.cdiv(per_split, tiles.warps)
    turns = triton.cdiv(turns, triton.cdiv(turns, MOST_TURNS))
    grid = (triton.cdiv(triton.cdiv(outputs, OUTPUTS), own_tiles), triton.cdiv(rows, row_tiles * ROWS), tiles.splits)
    _packed_rows[grid](
        x,
        part.numbers,
        part.scales,
        x if bias is None else bias,
        x if norm is None else norm.weight,
        out,
        rows,
        outputs,
        out.shape[2],
        first_output,
        0.0 if norm is None else norm.eps,
        COLUMNS=columns,
        TURNS=turns,
        STAGES=min(tiles.stages, turns),
        SPLITS=tiles.splits,
        BITS=part.bits,
        IS_FLOAT=part.is_float,
        BLOCKS=part.blocks,
        TILES=tiles.tiles,
        ROW_TILES=row_tiles,
        NORM_WIDTH=triton.next_power_of_2(columns),
        HAS_BIAS=bias is not None,
        ADDS=adds,
        PAIRED=is_paired,
        UNIT=texts.unit,
        UNPACK=texts.unpack,
        SCALE=texts.scale,
        NORM="" if norm is None else _NORM[x.dtype],
        PRODUCT=_PRODUCT.format(number={torch.bfloat16: "bf16", torch.float16: "f16"}[x.dtype]),
        num_warps=tiles.warps,
        **launch_options(overlap),
    )


# Relaxed loads stay where they are written: the compiler moves others down to where they are needed, past the wait.
_LOAD = gl.constexpr("ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_WHERE = gl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $5, 0;
mov.b32 $0, 0;
mov.b32 $1, 0;
mov.b32 $2, 0;
mov.b32 $3, 0;
@p ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_LOAD_PAIR = gl.constexpr("ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];")
_LOAD_PAIR_WHERE = gl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $3, 0;
mov.b32 $0, 0;
mov.b32 $1, 0;
@p ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];
}""")
_LOAD_INPUT_PAIR = gl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")
_STORE = gl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $6, 0;
@p st.global.v4.b32 [$1], {$2, $3, $4, $5};
mov.b32 $0, 0;
}""")
_FROM_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xFFFFFFFF;")
_LOAD_INPUTS = gl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")


@gluon.jit
def load_words(pointer, inside, WHERE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four words of what no kernel writes; zeros where `inside` is."""
    if WHERE:
        words = gl.inline_asm_elementwise(
            _LOAD_WHERE, "=&r,=&r,=&r,=&r,l,r", [pointer, inside], (gl.int32,) * 4, is_pure=False, pack=1
        )
    else:
        words = gl.inline_asm_elementwise(_LOAD, "=r,=r,=r,=r,l", [pointer], (gl.int32,) * 4, is_pure=False, pack=1)
    return words


@gluon.jit
def load_pair(pointer, inside, WHERE: gl.constexpr):  # type: ignore[no-untyped-def]
    if WHERE:
        words = gl.inline_asm_elementwise(
            _LOAD_PAIR_WHERE, "=&r,=&r,l,r", [pointer, inside], (gl.int32,) * 2, is_pure=False, pack=1
        )
    else:
        words = gl.inline_asm_elementwise(_LOAD_PAIR, "=r,=r,l", [pointer], (gl.int32,) * 2, is_pure=False, pack=1)
    return words


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
def decode_scale(word, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """A scale, and minus the zero point in both halves of a word."""
    return gl.inline_asm_elementwise(TEXT, "=&f,=&r,r", [word], (gl.float32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def unpack_nibbles(word, zero, other_zero, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """A word -> the four registers of a matrix instruction's left side."""
    return gl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,r,r,r", [word, zero, other_zero], (gl.int32,) * 4, is_pure=True, pack=1
    )


@gluon.jit
def unpack_octets(word, zero, other_zero, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """A word -> two of the four registers."""
    return gl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r,r,r", [word, zero, other_zero], (gl.int32,) * 2, is_pure=True, pack=1
    )


@gluon.jit
def normed(word, weight, scale, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two numbers of a row, normed and rounded as the norm's own kernel would write them."""
    return gl.inline_asm_elementwise(TEXT, "=&r,r,r,f", [word, weight, scale], gl.int32, is_pure=True, pack=1)


@gluon.jit
def scaled(word, scale, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two numbers times a scale in float32, each rounded once."""
    return gl.inline_asm_elementwise(TEXT, "=r,r,f", [word, scale], gl.int32, is_pure=True, pack=1)


@gluon.jit
def store_words(pointer, first, second, third, fourth, inside):  # type: ignore[no-untyped-def]
    words = [pointer, first, second, third, fourth, inside]
    gl.inline_asm_elementwise(_STORE, "=r,l,r,r,r,r,r", words, gl.int32, is_pure=False, pack=1)


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
def ask(  # type: ignore[no-untyped-def]
    numbers, scales, group, end, WHERE: gl.constexpr, TILES: gl.constexpr, CHUNKS: gl.constexpr, BLOCKS: gl.constexpr
):
    """The words of 128 columns of every tile, then their scales."""
    inside = (group < end).to(gl.int32)
    held = ()
    for tile in gl.static_range(TILES):
        for chunk in gl.static_range(CHUNKS):
            held = held + load_words(numbers[tile] + (group * CHUNKS + chunk) * 128, inside, WHERE)
    for tile in gl.static_range(TILES):
        for block in gl.static_range(BLOCKS):
            held = held + load_pair(scales[tile] + (group * BLOCKS + block) * 16, inside, WHERE)
    return held


@gluon.jit
def _read(inputs, column, columns, ROW_TILES: gl.constexpr, EVEN: gl.constexpr):  # type: ignore[no-untyped-def]
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
def _own(lane, group, columns, EVEN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the four columns of 128 stand that a thread norms for its warp."""
    at = group * 128 + lane // 8 * 32
    if not EVEN:
        at = gl.minimum(at, columns - 32)
    return at + lane % 4 * 8 + lane // 4 % 2 * 4


@gluon.jit
def _spread(pair, lane):  # type: ignore[no-untyped-def]
    """What each thread of a warp has normed -> 128 columns as `_read` has them."""
    held = ()
    for half in gl.static_range(8):
        source = lane % 4 + 4 * half
        held = held + (from_lane(pair[0], source), from_lane(pair[1], source))
    return held


@gluon.jit
def unpacked(
    words, FIRST: gl.constexpr, STEP: gl.constexpr, zero, other_zero, BITS: gl.constexpr, UNPACK: gl.constexpr
):  # type: ignore[no-untyped-def]
    """The left side of a matrix instruction: 16 columns of a tile whose words begin at FIRST."""
    if BITS == 4:
        left = unpack_nibbles(words[FIRST + STEP], zero, other_zero, UNPACK)
    else:
        left = unpack_octets(words[FIRST + 2 * STEP], zero, other_zero, UNPACK)
        left = left + unpack_octets(words[FIRST + 2 * STEP + 1], zero, other_zero, UNPACK)
    return left


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
def as_float(word):  # type: ignore[no-untyped-def]
    return word.to(gl.float32, bitcast=True)


@gluon.jit
def scale_of(words, AT: gl.constexpr, IS_FLOAT: gl.constexpr, SCALE: gl.constexpr):  # type: ignore[no-untyped-def]
    if IS_FLOAT:  # noqa: SIM108 - the compiler's branch
        found = (as_float(words[AT]), words[AT])
    else:
        found = decode_scale(words[AT], SCALE)
    return found


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
def _add(  # type: ignore[no-untyped-def]
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


@triton.constexpr_function
def _by_parts(rank):  # type: ignore[no-untyped-def]
    """Threads of a part lie one after the other, then the next part."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank)))


@gluon.jit
def stacked(parts, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """(threads, 2, 2, ...): the bits of a part's number, lowest first."""
    if COUNT == 1:
        whole = parts[0]
    else:
        pairs = ()
        for pair in gl.static_range(COUNT // 2):
            pairs = pairs + (gl.join(parts[2 * pair], parts[2 * pair + 1]),)
        whole = stacked(pairs, COUNT // 2)
    return whole


@gluon.jit
def _packed_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x,
    numbers,
    scales,
    bias,
    norm_weight,
    out,
    rows,
    outputs,
    all_outputs,
    first_output,
    eps,
    COLUMNS: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    BITS: gl.constexpr,
    IS_FLOAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    NORM_WIDTH: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ADDS: gl.constexpr,
    PAIRED: gl.constexpr,
    UNIT: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE: gl.constexpr,
    NORM: gl.constexpr,
    PRODUCT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    start_next(OVERLAP)
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    CHUNKS: gl.constexpr = BITS // 2
    GROUPS: gl.constexpr = (COLUMNS + 127) // 128
    PER_SPLIT: gl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    LAPS: gl.constexpr = (PER_SPLIT + WARPS * TURNS - 1) // (WARPS * TURNS)
    # Whether every warp has something to do in every turn but, perhaps, the last.
    EVEN: gl.constexpr = LAPS == 1 and GROUPS % SPLITS == 0
    WHOLE: gl.constexpr = COLUMNS % 128 == 0
    OWN: gl.constexpr = TILES // 2 if PAIRED else TILES
    PARTS: gl.constexpr = TILES * ROW_TILES * 4
    each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    thread = gl.arange(0, THREADS, layout=each)
    lane = thread % 32
    warp = thread // 32
    split = gl.program_id(2)
    first_group = split * PER_SPLIT
    end = gl.minimum(first_group + PER_SPLIT, GROUPS)
    num_tiles = (outputs + 15) // 16
    first_tile = gl.program_id(0) * OWN
    tile_numbers = ()
    tile_scales = ()
    for tile in gl.static_range(TILES):
        which = gl.minimum(first_tile + tile % OWN, num_tiles - 1)  # past the end the last one again
        if tile >= OWN:
            which += num_tiles
        start = which.to(gl.int64) * GROUPS
        tile_numbers = tile_numbers + (numbers + start * (CHUNKS * 128) + lane * 4,)
        tile_scales = tile_scales + (scales + start * (BLOCKS * 16) + lane // 4 * 2,)

    first_row = gl.program_id(1) * (ROW_TILES * 8)
    inputs = ()
    for tile in gl.static_range(ROW_TILES):
        row = gl.minimum(first_row + tile * 8 + lane // 4, rows - 1)
        inputs = inputs + (x + row.to(gl.int64) * COLUMNS + lane % 4 * 8,)

    nothing = gl.full([THREADS], 0.0, gl.float32, layout=each)
    totals = ()
    for _ in gl.static_range(PARTS):
        totals = totals + (nothing,)
    for lap in gl.static_range(LAPS):
        group = first_group + warp + lap * (TURNS * WARPS)
        stages = ()
        for turn in gl.static_range(STAGES):
            stages = stages + (
                ask(
                    tile_numbers, tile_scales, group + turn * WARPS, end,
                    not (EVEN and (turn + 1) * WARPS <= PER_SPLIT), TILES, CHUNKS, BLOCKS,
                ),
            )  # fmt: skip
        weights = ()
        if NORM != "":
            for turn in gl.static_range(TURNS):
                at = _own(lane, gl.minimum(group + turn * WARPS, GROUPS - 1), COLUMNS, WHOLE)
                weights = weights + (load_pair(norm_weight + at, at, False),)
        if lap == 0:
            wait_for_last(OVERLAP)
            scale = nothing
            if NORM != "":
                wide: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
                everywhere = gl.arange(0, NORM_WIDTH, layout=wide)
                row = gl.load(x + everywhere, mask=everywhere < COLUMNS, other=0.0).to(gl.float32)
                scale = nothing + gl.rsqrt(gl.sum(row * row, axis=0) / COLUMNS + eps)
        raw = ()
        if NORM != "":
            for turn in gl.static_range(TURNS):
                at = _own(lane, gl.minimum(group + turn * WARPS, GROUPS - 1), COLUMNS, WHOLE)
                raw = raw + (load_input_pair(x + at),)
        else:
            ahead = _read(inputs, gl.minimum(group, GROUPS - 1) * 128, COLUMNS, ROW_TILES, WHOLE)
        for turn in gl.static_range(TURNS):
            if NORM != "":
                first = normed(raw[turn][0], weights[turn][0], scale, NORM)
                values = _spread((first, normed(raw[turn][1], weights[turn][1], scale, NORM)), lane)
            else:
                values = ahead
                column = gl.minimum(group + (turn + 1) * WARPS, GROUPS - 1) * 128
                if ROW_TILES == 1 and turn + 1 < TURNS:
                    ahead = _read(inputs, column, COLUMNS, ROW_TILES, WHOLE)
            totals = _add(
                totals, stages[turn], values, nothing,
                BITS, IS_FLOAT, TILES, ROW_TILES, BLOCKS, UNPACK, SCALE, PRODUCT,
            )  # fmt: skip
            if NORM == "" and ROW_TILES > 1 and turn + 1 < TURNS:
                ahead = _read(inputs, column, COLUMNS, ROW_TILES, WHOLE)
            if turn + STAGES < TURNS:
                stages = stages + (
                    ask(
                        tile_numbers, tile_scales, group + (turn + STAGES) * WARPS, end,
                        not (EVEN and (turn + STAGES + 1) * WARPS <= PER_SPLIT), TILES, CHUNKS, BLOCKS,
                    ),
                )  # fmt: skip

    # Of a warp's sums, part p of a thread: 16 outputs by 8 rows, 4 of them a thread.
    whole_sums = stacked(totals, PARTS)
    shared = gl.allocate_shared_memory(gl.float32, whole_sums.shape, _by_parts(len(whole_sums.shape)))
    shared.store(whole_sums)
    whole = shared._reinterpret(gl.float32, [PARTS, WARPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    OUT: gl.constexpr = OWN * ROW_TILES * 4
    summed: gl.constexpr = gl.BlockedLayout([1, WARPS, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    parts_left: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, summed))
    lanes_left: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, summed))
    total = gl.sum(whole.slice(0, OUT).load(summed), axis=1) * UNIT
    part = gl.arange(0, OUT, layout=parts_left)
    lane = gl.arange(0, 32, layout=lanes_left)
    output = ((first_tile + part // (ROW_TILES * 4)) * 16 + part % 4 // 2 * 8)[:, None] + (lane // 4)[None, :]
    row = (first_row + part // 4 % ROW_TILES * 8 + part % 2)[:, None] + (lane % 4 * 2)[None, :]
    kept = (output < outputs) & (row < rows)
    dtype: gl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        total += gl.load(bias + output, mask=kept, other=0.0).to(gl.float32)
    if PAIRED:
        up = gl.sum(whole.slice(OUT, OUT).load(summed), axis=1) * UNIT
        if HAS_BIAS:
            up += gl.load(bias + outputs + output, mask=kept, other=0.0).to(gl.float32)
        # Rounded where torch's own operators round.
        gate = total.to(dtype).to(gl.float32)
        activated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        total = activated * up.to(dtype).to(gl.float32)
    target = out + (split * rows + row).to(gl.int64) * all_outputs + first_output + output
    if ADDS:
        total = total.to(dtype).to(gl.float32) + gl.load(target, mask=kept, other=0.0).to(gl.float32)
    gl.store(target, total.to(dtype), mask=kept)
