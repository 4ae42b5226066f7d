"""The inner loop of paged attention: a tile of queries walks a stretch of positions, in float32, by online softmax.

    positions   start ......................... end
                |  BLOCK_N  |  BLOCK_N  |  BLOCK_N |        one tile of keys and values at a time
    slots       table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

Kept along the way, per query: `peak`, the largest score so far (in powers of two); `total`, the sum of
2^(score - peak); and `output`, the values weighed the same way. `begin` starts them, `finish` makes them a part.

EXACT, for batch invariance: a query's part has the same bits in whatever tile it stands, beside whichever others.
Scores, `total` and `output` are then matrix products, whose sums run over dimensions or positions in their order; so
`total` is a product with ones, where it would be a sum whose order follows from the tile. The peak is exact in any
order, and the rest is done number by number, a multiplication and an addition never contracted (`EXACT_OPTIONS`). What
a query does not see weighs exactly nothing: a tile of it leaves all its numbers as they are. The matrix instruction
must be of one kind in all kernels: tiles are of fewer than 64 queries, for which Hopper's compiler takes mma.sync, not
wgmma. `begin`, `fold` and `whole` make one output of a row's parts, taken in their order, in every kernel alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_OF_E = 1.4426950408889634  # hosts fold it into the scale: exp2 is what the hardware has
LN_2 = tl.constexpr(0.6931471805599453)
COLUMNS = tl.constexpr(16)  # of the product that sums weights, all alike: what the matrix units take

EXACT_BLOCK_N = {2: 64, 4: 32}  # positions of a tile, by bytes of a number: in all kernels, or parts would differ
EXACT_BLOCK_M = {2: 32, 4: 16}  # queries of a tile, at most
EXACT_OPTIONS = {"enable_fp_fusion": False}  # of a launch


@triton.jit
def begin(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    output = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    return output, total, peak


@triton.jit
def begin_part(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    output, total, peak = begin(ROWS, HEAD_DIM)
    if EXACT:
        return output, tl.zeros([ROWS, COLUMNS], dtype=tl.float32), peak
    else:  # noqa: RET505 (two types: the compiler takes one branch)
        return output, total, peak


@triton.jit
def read_tile(  # type: ignore[no-untyped-def]
    keys_of_head,  # (1, HEAD_DIM) -> the keys of one head in the first slot
    table,
    position,  # (BLOCK_N,)
    inside,  # (BLOCK_N,)
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,  # False: all positions are inside
):
    """The keys and values (BLOCK_N, HEAD_DIM) of some positions; zeros outside."""
    keys_to_values: tl.constexpr = KV_HEADS * HEAD_DIM
    slot_stride: tl.constexpr = 2 * keys_to_values
    # A pool may hold more than 2^31 numbers.
    if MASKED:
        # What lies outside may be anything, NaN too: it is never loaded.
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        pointers = keys_of_head + (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * slot_stride
        keys = tl.load(pointers, mask=inside[:, None], other=0.0)
        values = tl.load(pointers + keys_to_values, mask=inside[:, None], other=0.0)
    else:
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        pointers = keys_of_head + (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * slot_stride
        keys = tl.load(pointers)
        values = tl.load(pointers + keys_to_values)
    return keys, values


@triton.jit
def see(  # type: ignore[no-untyped-def]
    output,
    total,
    peak,
    queries,
    keys,  # (BLOCK_N, HEAD_DIM)
    values,
    position,  # (BLOCK_N,)
    inside,
    scale,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    CAUSAL: tl.constexpr,
    limits,
):
    """One tile more; see `walk`."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if CAUSAL:
        scores = tl.where(position[None, :] < limits[:, None], scores, float("-inf"))
    elif MASKED:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    # Unless causal, the first position of a stretch is seen, so the peak is finite from the first tile on.
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    level = new_peak
    if CAUSAL:
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(peak - level)
    if EXACT:
        ones = tl.full([values.shape[0], COLUMNS], 1.0, dtype=values.dtype)
        total = tl.dot(weights.to(values.dtype), ones, total * shrink[:, None], input_precision="ieee")
    else:
        total = total * shrink + tl.sum(weights, 1)
    output = output * shrink[:, None]
    output = tl.dot(weights.to(values.dtype), values, output, input_precision="ieee")
    return output, total, new_peak


@triton.jit
def walk(  # type: ignore[no-untyped-def]
    output,  # (ROWS, HEAD_DIM) float32
    total,  # (ROWS,) float32; exact: (ROWS, COLUMNS), columns alike
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
    EXACT: tl.constexpr = False,
    CAUSAL: tl.constexpr = False,  # exact ones only
    limits=0,  # (ROWS,) where causal: each query sees positions below
):
    offset = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    keys_of_head = kv + kv_head * HEAD_DIM + dim[None, :]
    for at in range(start, end, BLOCK_N):
        position = at + offset
        inside = position < end
        keys, values = read_tile(keys_of_head, table, position, inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MASKED)
        output, total, peak = see(
            output, total, peak, queries, keys, values, position, inside, scale, MASKED, EXACT, CAUSAL, limits
        )
    return output, total, peak


@triton.jit
def walk_parts(  # type: ignore[no-untyped-def]
    folded,  # (ROWS, HEAD_DIM), and as `fold` keeps them
    weight,
    top,
    output,  # of the part that begins at the start, as `begin_part` makes them
    total,
    peak,
    queries,
    kv,
    table,
    kv_head,
    start,
    end,
    cut,  # -> the cut that comes after the start; all cuts are multiples of BLOCK_N
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `walk`, exactly, over several parts in one loop: at each cut the part is folded into those before it. Returns
    these, and the last part as it is."""
    offset = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    keys_of_head = kv + kv_head * HEAD_DIM + dim[None, :]
    next_cut = tl.load(cut)
    for at in range(start, end, BLOCK_N):
        if at == next_cut:
            values_of_part, score = finish(output, total, peak, EXACT=True)
            folded, weight, top = fold(folded, weight, top, values_of_part, score)
            output, total, peak = begin_part(output.shape[0], HEAD_DIM, EXACT=True)
            cut += 1
            next_cut = tl.load(cut)
        position = at + offset
        inside = position < end
        keys, values = read_tile(keys_of_head, table, position, inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MASKED=True)
        output, total, peak = see(
            output, total, peak, queries, keys, values, position, inside, scale,
            MASKED=True, EXACT=True, CAUSAL=False, limits=0,
        )  # fmt: skip
    return folded, weight, top, output, total, peak


@triton.jit
def walk_to_the_end(  # type: ignore[no-untyped-def]
    output,
    total,
    peak,
    queries,
    kv,
    table,
    kv_head,
    start,
    full_end,  # a multiple of BLOCK_N from the start; up to there every query sees all
    end,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
    CAUSAL: tl.constexpr = False,
    limits=0,
):
    """As `walk`, with a mask only where one is needed: on every tile it would cost much of what the softmax does."""
    output, total, peak = walk(
        output, total, peak, queries, kv, table, kv_head, start, full_end, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=False, EXACT=EXACT,
    )  # fmt: skip
    return walk(
        output, total, peak, queries, kv, table, kv_head, full_end, end, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True, EXACT=EXACT, CAUSAL=CAUSAL, limits=limits,
    )  # fmt: skip


@triton.jit
def finish(output, total, peak, EXACT: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """The attended values and the natural log of the sum of e^score; zeros and minus infinity if nothing was seen."""
    if EXACT:
        total = tl.max(total, 1)  # of columns that are alike
    seen = total != 0  # NaN, a fault of the model, counts as seen: it must not look like nothing
    divisor = tl.where(seen, total, 1.0)
    score = tl.where(seen, peak * LN_2 + tl.log(divisor), float("-inf"))
    return output / divisor[:, None], score


@triton.jit
def fold(output, total, peak, values, score):  # type: ignore[no-untyped-def]
    """Parts so far, and one more: values (ROWS, HEAD_DIM) and score (ROWS,), minus infinity where it saw nothing."""
    empty = score == float("-inf")
    new_peak = tl.maximum(peak, score)
    # Nothing seen so far: any finite number keeps -inf minus -inf from being NaN.
    level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp(score - level)
    shrink = tl.exp(peak - level)
    values = tl.where(empty[:, None], 0.0, values)  # nothing times NaN would be NaN
    return output * shrink[:, None] + values * weight[:, None], total * shrink + weight, new_peak


@triton.jit
def whole(output, total):  # type: ignore[no-untyped-def]
    """What the folded parts come to; zeros if there were none. NaN, a fault of the model, is not 0 and stays."""
    return tl.div_rn(output, tl.where(total == 0, 1.0, total)[:, None] + tl.zeros_like(output))
