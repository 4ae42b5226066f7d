"""How tiles of several key-value heads come to a program of block_decode.py: where they lie, copies, requests ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ramify.gpu.kernels.overlap import LINE

PER_LINE = gl.constexpr(LINE // 2)  # numbers of two bytes


@gluon.jit
def slots_of(table, at, end, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where positions at .. at + TILE lie; minus one past the end, where anything may lie, NaN too."""
    position = at + gl.arange(0, TILE, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    inside = position < end
    which = position.to(gl.uint32)
    block = gl.load(table + which // BLOCK_SIZE, mask=inside, other=0)
    return gl.where(inside, block * BLOCK_SIZE + (which % BLOCK_SIZE).to(gl.int32), -1)


@gluon.jit
def copy_tile(keys, values, slots, source, KEYS_TO_VALUES: gl.constexpr):  # type: ignore[no-untyped-def]
    """source (HEADS, 1, HEAD_DIM) -> the keys of some heads at slot 0. What is not copied becomes zero."""
    # A pool may hold more than 2^31 numbers.
    pointers = source + (slots.to(gl.int64) * (2 * KEYS_TO_VALUES))[None, :, None]
    inside = (slots >= 0)[None, :, None]
    async_copy.async_copy_global_to_shared(keys, pointers, mask=inside)
    async_copy.async_copy_global_to_shared(values, pointers + KEYS_TO_VALUES, mask=inside)
    async_copy.commit_group()


@gluon.jit
def prefetch_tile(  # type: ignore[no-untyped-def]
    kv,
    table,
    at,
    end,
    first_head,
    KV_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Asks for the lines of what there is of a tile, before the wait. The newest position may be written meanwhile,
    which the cache sees."""
    lines: gl.constexpr = HEAD_DIM // PER_LINE
    lined: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32 // lines, lines], [gl.num_warps(), 1, 1], [2, 1, 0])
    slots = slots_of(table, at, end, BLOCK_SIZE, TILE, lined)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, lined)))
    line = gl.arange(0, lines, layout=gl.SliceLayout(0, gl.SliceLayout(1, lined)))
    keys_to_values: gl.constexpr = KV_HEADS * HEAD_DIM
    of_slot = (gl.maximum(slots, 0).to(gl.int64) * (2 * keys_to_values))[None, :, None]
    pointers = kv + of_slot + ((first_head + head) * HEAD_DIM)[:, None, None] + (line * PER_LINE)[None, None, :]
    for each in gl.static_range(2):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers + each * keys_to_values],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
