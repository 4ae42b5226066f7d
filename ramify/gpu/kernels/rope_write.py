"""From one packed product to rotated queries and a written cache.

    qkv row   [ query heads | key heads | value heads ]      parts of a product, added up here
                    |             |            |
               norm, turn    norm, turn        |          norm where the model has one (Qwen3)
                    |             |            |
                 queries     kv[slot, 0]  kv[slot, 1]

A slot below 0 marks a padding row: nothing is written for it. Programs beyond those of heads ask for weights
(ahead.py): where rows are few, the memory is idle from here until attention has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.ahead import Ahead, ask_ahead
from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last
from ramify.gpu.kernels.parts import Parts, sum_of_parts

HEADS_AT_ONCE = 8
NUM_WARPS = 4
ASKING = 128  # programs: about one a processor


def rope_and_write(
    qkv: Parts,
    positions: Tensor,
    slots: Tensor,
    frequencies: Tensor,
    attention_factor: float,
    queries: Tensor,
    kv_layer: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    ahead: Ahead | None = None,
    overlap: bool = False,
) -> None:
    """qkv: parts of (T, (heads + 2 * kv_heads) * head_dim), positions, slots (T,), frequencies (head_dim / 2,) float32.

    Queries go to queries (T, heads, head_dim), keys and values to kv_layer (slots, 2, kv_heads, head_dim).
    Norm weights are (head_dim,), both or none. ahead: what to ask for, where kernels overlap. With `overlap`, positions
    and slots were complete before the preceding kernel began.
    """
    tokens, heads, head_dim = queries.shape
    kv_heads = kv_layer.shape[2]
    all_heads = heads + 2 * kv_heads
    has_norm = query_norm is not None
    assert has_norm == (key_norm is not None), "queries and keys are normed alike"
    assert ahead is None or overlap, "the copy engine asks, on GPUs where kernels overlap"
    assert queries.stride()[1:] == kv_layer.stride()[2:] == (head_dim, 1), "the heads of a token lie in one piece"
    of_heads = triton.cdiv(all_heads, HEADS_AT_ONCE)
    asking = 0 if ahead is None else triton.cdiv(ASKING, tokens)
    _rope_and_write[(tokens, of_heads + asking)](
        qkv.values,
        qkv.values if qkv.bias is None else qkv.bias,
        positions,
        slots,
        frequencies,
        frequencies if query_norm is None else query_norm,
        frequencies if key_norm is None else key_norm,
        queries,
        kv_layer,
        kv_layer if ahead is None else ahead.tensor,
        0 if ahead is None else ahead.count,
        0 if ahead is None else ahead.stride,
        0 if ahead is None else ahead.length,
        0 if ahead is None else ahead.to_half,
        qkv.values.stride(0),
        qkv.values.stride(1),
        queries.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        attention_factor,
        eps,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        half_width=triton.next_power_of_2(head_dim // 2),
        heads_at_once=HEADS_AT_ONCE,
        has_norm=has_norm,
        num_parts=qkv.values.shape[0],
        has_bias=qkv.bias is not None,
        asks=ahead is not None,
        threads=32 * NUM_WARPS,
        num_warps=NUM_WARPS,
        **launch_options(overlap),
    )


@triton.jit
def _rope_and_write(
    qkv: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    frequencies: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    queries: tl.tensor,
    kv_layer: tl.tensor,
    ahead: tl.tensor,
    ahead_count: tl.tensor,
    ahead_stride: tl.tensor,
    ahead_length: tl.tensor,
    ahead_half: tl.tensor,
    qkv_part_stride: tl.tensor,
    qkv_stride: tl.tensor,
    queries_stride: tl.tensor,
    slot_stride: tl.tensor,
    keys_to_values: tl.tensor,
    attention_factor: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half_width: tl.constexpr,
    heads_at_once: tl.constexpr,
    has_norm: tl.constexpr,
    num_parts: tl.constexpr,
    has_bias: tl.constexpr,
    asks: tl.constexpr,
    threads: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    half: tl.constexpr = head_dim // 2
    lane = tl.arange(0, half_width)[None, :]
    # Angles in float32; everything after is rounded where torch's operators round.
    dtype: tl.constexpr = queries.dtype.element_ty
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + lane, mask=lane < half, other=0.0)
    cosine = (tl.cos(angle) * attention_factor).to(dtype).to(tl.float32)
    sine = (tl.sin(angle) * attention_factor).to(dtype).to(tl.float32)
    wait_for_last(OVERLAP)
    if asks:
        of_heads: tl.constexpr = (heads + 2 * kv_heads + heads_at_once - 1) // heads_at_once
        if tl.program_id(1) >= of_heads:
            number = (tl.program_id(1) - of_heads) * tl.num_programs(0) + tl.program_id(0)
            programs = (tl.num_programs(1) - of_heads) * tl.num_programs(0)
            ask_ahead(ahead, ahead_count, ahead_stride, ahead_length, ahead_half, number, programs, THREADS=threads)
    if slot >= 0:
        head = tl.program_id(1) * heads_at_once + tl.arange(0, heads_at_once)[:, None]
        is_query = head < heads
        is_value = head >= heads + kv_heads
        inside = (head < heads + 2 * kv_heads) & (lane < half)

        # A head as its two halves: lane i turns with lane i of the other half.
        column = head * head_dim + lane
        source = qkv + token * qkv_stride + column
        first = sum_of_parts(source, qkv_part_stride, bias + column, inside, dtype, num_parts, has_bias)
        second = sum_of_parts(source + half, qkv_part_stride, bias + column + half, inside, dtype, num_parts, has_bias)
        x, y = first.to(tl.float32), second.to(tl.float32)
        if has_norm:
            scale = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / head_dim + eps)[:, None]
            in_head = lane < half
            query_x = tl.load(query_norm + lane, mask=in_head, other=0.0)
            query_y = tl.load(query_norm + half + lane, mask=in_head, other=0.0)
            key_x = tl.load(key_norm + lane, mask=in_head, other=0.0)
            key_y = tl.load(key_norm + half + lane, mask=in_head, other=0.0)
            x = tl.where(is_query, query_x, key_x).to(tl.float32) * (x * scale).to(dtype).to(tl.float32)
            y = tl.where(is_query, query_y, key_y).to(tl.float32) * (y * scale).to(dtype).to(tl.float32)
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)

        turned_x = ((x * cosine).to(dtype).to(tl.float32) - y * sine).to(dtype)
        turned_y = ((y * cosine).to(dtype).to(tl.float32) + x * sine).to(dtype)

        target = queries + token * queries_stride + head * head_dim + lane
        tl.store(target, turned_x, mask=inside & is_query)
        tl.store(target + half, turned_y, mask=inside & is_query)
        kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
        target = kv_layer + slot * slot_stride + tl.where(is_value, keys_to_values, 0) + kv_head * head_dim + lane
        tl.store(target, tl.where(is_value, first, turned_x), mask=inside & ~is_query)
        tl.store(target + half, tl.where(is_value, second, turned_y), mask=inside & ~is_query)
