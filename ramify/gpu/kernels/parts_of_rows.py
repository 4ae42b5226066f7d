"""A row's parts in memory: how they are left there, counted, read again and merged.

    one program        | walk | leave | is_last: no
    another one            | walk  | leave | is_last: yes | merged, all parts in their order |
    a third            | walk | with_parts: of a row that has no other part of its own, shared ones |

Exact ones are folded by walk.py's `fold`, all others merged by log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.gpu.kernels.walk import LOG2_OF_E, begin, finish, fold, whole

LOG2 = tl.constexpr(LOG2_OF_E)


@triton.jit
def leave(output, total, peak, partials, lse, target, real, HEAD_DIM: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes what a walk found as a part."""
    values, score = finish(output, total, peak, EXACT)
    tl.store(partials + target[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], values, mask=real[:, None])
    tl.store(lse + target, score, mask=real)


@triton.jit
def is_last(arrived, count):  # type: ignore[no-untyped-def]
    """Counts a part that this program has written; whether all are there now. Then the counter is 0 again."""
    tl.debug_barrier()  # all of the part is written before it is counted
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    is_last = before == count - 1
    if is_last:
        tl.store(arrived, 0)
    return is_last


@triton.jit
def read_part(partials, lse, source, real, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of some heads, as `_leave` wrote it: past the L1 cache, which does not see what other processors wrote."""
    score = tl.load(lse + source, mask=real, other=0.0, cache_modifier=".cg")
    values = tl.load(
        partials + source[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :],
        mask=real[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return values, score


@triton.jit
def with_parts(  # type: ignore[no-untyped-def]
    output,  # (PADDED_QUERIES, HEAD_DIM), and as walk keeps them
    total,
    peak,
    partials,
    lse,
    source,
    count,
    real,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """What a walk found, merged with `count` parts, the first at `source`."""
    for part in tl.range(0, count, loop_unroll_factor=4):
        values, score = read_part(partials, lse, source + part * HEADS, real, HEAD_DIM)
        score *= LOG2
        new_peak = tl.maximum(peak, score)  # finite: every part has seen a position
        weight = tl.exp2(score - new_peak)
        shrink = tl.exp2(peak - new_peak)
        output = output * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    return output / total[:, None]


@triton.jit
def merged(  # type: ignore[no-untyped-def]
    partials,
    lse,
    source,
    count,
    real,
    HEADS: tl.constexpr,
    PADDED_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """`count` parts of some heads, the first at `source`, merged by log-sum-exp."""
    output, total, peak = begin(PADDED_QUERIES, HEAD_DIM)
    if EXACT:
        output, total, peak = folded_parts(output, total, peak, partials, lse, source, count, real, HEADS, HEAD_DIM)
        return whole(output, total)
    else:  # noqa: RET505 (the compiler takes one branch)
        for part in tl.range(0, count, loop_unroll_factor=4):
            values, score = read_part(partials, lse, source + part * HEADS, real, HEAD_DIM)
            new_peak = tl.maximum(peak, score)  # finite: every part has seen a position
            weight = tl.exp(score - new_peak)
            shrink = tl.exp(peak - new_peak)
            output = output * shrink[:, None] + values * weight[:, None]
            total = total * shrink + weight
            peak = new_peak
        return output / total[:, None]


@triton.jit
def folded_parts(  # type: ignore[no-untyped-def]
    folded,
    weight,
    top,
    partials,
    lse,
    source,
    count,
    real,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The same exactly (walk.py), and not yet divided."""
    for part in tl.range(0, count, loop_unroll_factor=4):
        values, score = read_part(partials, lse, source + part * HEADS, real, HEAD_DIM)
        folded, weight, top = fold(folded, weight, top, values, score)
    return folded, weight, top
