"""The inner loop of paged attention: a tile of queries walks a stretch of positions, in float32, by online softmax.

    positions   start ......................... end
                |  BLOCK_N  |  BLOCK_N  |  BLOCK_N |        one tile of keys and values at a time
    slots       table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

Kept along the way, per query: `peak`, the largest score so far (in powers of two); `total`, the sum of
2^(score - peak); and `output`, the values weighed the same way. `begin` starts them, `finish` makes them a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_OF_E = 1.4426950408889634  # hosts fold it into the scale: exp2 is what the hardware has
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def begin(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    output = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    return output, total, peak


@triton.jit
def walk(  # type: ignore[no-untyped-def]
    output,  # (ROWS, HEAD_DIM) float32
    total,  # (ROWS,) float32
    peak,  # (ROWS,) float32
    queries,  # (ROWS, HEAD_DIM)
    kv,  # -> (slots, 2, KV_HEADS, HEAD_DIM)
    table,  # -> the block table of the row whose positions these are
    kv_head,
    start,
    end,
    scale,  # of scores, times LOG2_OF_E
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: end - start is a multiple of BLOCK_N
):
    keys_to_values: tl.constexpr = KV_HEADS * HEAD_DIM
    slot_stride: tl.constexpr = 2 * keys_to_values
    offset = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    keys_of_head = kv + kv_head * HEAD_DIM + dim[None, :]
    for at in range(start, end, BLOCK_N):
        position = at + offset
        inside = position < end
        # A pool may hold more than 2^31 numbers.
        if MASKED:
            # What lies past the end may be anything, NaN too: it is never loaded.
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            pointers = keys_of_head + slot[:, None] * slot_stride
            keys = tl.load(pointers, mask=inside[:, None], other=0.0)
            values = tl.load(pointers + keys_to_values, mask=inside[:, None], other=0.0)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            pointers = keys_of_head + slot[:, None] * slot_stride
            keys = tl.load(pointers)
            values = tl.load(pointers + keys_to_values)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        # The first position of a stretch is inside, so the peak is finite from the first tile on.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None]
        output = tl.dot(weights.to(values.dtype), values, output, input_precision="ieee")
        peak = new_peak
    return output, total, peak


@triton.jit
def finish(output, total, peak):  # type: ignore[no-untyped-def]
    """The attended values and the natural log of the sum of e^score; zeros and minus infinity if nothing was seen."""
    seen = total != 0  # NaN, a fault of the model, counts as seen: it must not look like nothing
    divisor = tl.where(seen, total, 1.0)
    score = tl.where(seen, peak * LN_2 + tl.log(divisor), float("-inf"))
    return output / divisor[:, None], score
