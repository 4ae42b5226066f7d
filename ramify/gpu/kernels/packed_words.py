"""What threads do with words of few bits: read them, and make numbers of them.

Bits become numbers without a conversion. As bits of a bfloat16 (float16) they are that whole number times the smallest
one, 2^-133 (2^-24); one multiplication brings it back among ordinary numbers, and subtracts the zero in the same
instruction. Exact, since it has at most 8 bits. So two numbers of 4 bits take two instructions and a share of a shift.

Gluon, Triton's lower language: every tensor here has one element for each thread, and tuples of them are its registers.
The layout of words stands in packed_parts.py.
"""

# ruff: noqa: RUF005 - the compiler knows no starred tuples

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ramify.gpu.packed_parts import PackedPart

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


def can_multiply(dtype: torch.dtype, part: PackedPart) -> bool:
    """Whether the part's device has the instructions for it, and it the sizes."""
    device = part.numbers.device
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_able and dtype.itemsize == 2 and not part.shape[1] % 32


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
def scaled(word, scale, TEXT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two numbers times a scale in float32, each rounded once."""
    return gl.inline_asm_elementwise(TEXT, "=r,r,f", [word, scale], gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_float(word):  # type: ignore[no-untyped-def]
    return word.to(gl.float32, bitcast=True)


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
def scale_of(words, AT: gl.constexpr, IS_FLOAT: gl.constexpr, SCALE: gl.constexpr):  # type: ignore[no-untyped-def]
    if IS_FLOAT:  # noqa: SIM108 - the compiler's branch
        found = (as_float(words[AT]), words[AT])
    else:
        found = decode_scale(words[AT], SCALE)
    return found


@gluon.jit
def unpacked(  # type: ignore[no-untyped-def]
    words, FIRST: gl.constexpr, STEP: gl.constexpr, zero, other_zero, BITS: gl.constexpr, UNPACK: gl.constexpr
):
    """The left side of a matrix instruction: 16 columns of a tile whose words begin at FIRST."""
    if BITS == 4:
        left = unpack_nibbles(words[FIRST + STEP], zero, other_zero, UNPACK)
    else:
        left = unpack_octets(words[FIRST + 2 * STEP], zero, other_zero, UNPACK)
        left = left + unpack_octets(words[FIRST + 2 * STEP + 1], zero, other_zero, UNPACK)
    return left


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
