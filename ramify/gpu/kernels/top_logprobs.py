"""Logprobs as reported, without a log-softmax in memory: of one token per row, with its rank, and of the likeliest.

rank         1 + how many logits are larger: only blocks whose largest logit is larger are read
likeliest    the largest of the blocks' largest, `count` times; after each, only its own block is read again
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.race import BLOCK, BlockScores, scaled, width_of

BLOCKS_AT_ONCE = tl.constexpr(16)  # that one program of _count_larger reads


class Reports(NamedTuple):
    """Where reports go."""

    logprobs: Tensor  # (R,) float32
    ranks: Tensor  # (R,) int32, from 1; tokens that tie share the best rank
    top_ids: Tensor  # (R, count) int64, likeliest first, the lowest id first among ties
    top_logprobs: Tensor  # (R, count) float32

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> Reports:
        return cls(
            torch.empty(rows, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, count, dtype=torch.int64, device=device),
            torch.empty(rows, count, device=device),
        )


class Processing(NamedTuple):
    """For logprobs of what temperature and filters leave, rather than of the logits as they are."""

    temperatures: Tensor  # (R,) float32; greedy rows (0) are reported as they are
    floors: Tensor  # (R,) float32: those that keep_above was given, minus infinity where none


def report(
    logits: Tensor,
    scores: BlockScores,
    token_ids: Tensor,
    reports: Reports,
    processing: Processing | None = None,
    *,
    asked: Tensor | None = None,
    with_ranks: bool = True,
) -> None:
    """Of logits (R, V) float32 and their scores: token_ids (R,) int64 and the `count` likeliest, into reports.

    count is the width of reports.top_ids, from 0 up to V; with `asked` (R,) int64 a row's first so many are listed, and
    the others stay what they were. Without ranks those are all 1. A row's logprobs are of softmax(logits), or, with
    `processing`, of the softmax that its token was drawn from.
    """
    rows, vocab_size = logits.shape
    num_blocks, count = scores.largest.shape[1], reports.top_ids.shape[1]
    assert count <= vocab_size, "there are not so many tokens"
    _report[(rows,)](
        logits,
        scores.largest,
        scores.largest_ids,
        scores.raw_sums,
        scores.sums,
        scores.largest if processing is None else processing.temperatures,
        scores.largest if processing is None else processing.floors,
        token_ids,
        token_ids if asked is None else asked,
        reports.logprobs,
        reports.ranks,
        reports.top_ids,
        reports.top_logprobs,
        logits.stride(0),
        count,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        width=width_of(num_blocks),
        is_processed=processing is not None,
        is_asked=asked is not None,
        num_warps=4,
    )
    if not with_ranks:
        return
    # Whole numbers add up to the same in any order, so many programs may count for one row.
    _count_larger[(rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE.value))](
        logits,
        scores.largest,
        token_ids,
        reports.ranks,
        logits.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        num_warps=4,
    )


@triton.jit
def _logprob(
    x: tl.tensor, largest: tl.tensor, temperature: tl.tensor, floor: tl.tensor, log_total: tl.tensor
) -> tl.tensor:
    return tl.where(x >= floor, scaled(x, largest, temperature) - log_total, float("-inf"))


@triton.jit
def _report(
    logits: tl.tensor,
    block_largest: tl.tensor,
    block_largest_ids: tl.tensor,
    raw_sums: tl.tensor,
    kept_sums: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    token_ids: tl.tensor,
    asked: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    logits_stride: tl.tensor,
    count: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    is_processed: tl.constexpr,
    is_asked: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    blocks = tl.arange(0, width)
    exists = blocks < num_blocks
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=exists, other=float("-inf"))
    # Each block's next id to list; one beyond the vocabulary: the block has nothing left.
    candidates = tl.load(block_largest_ids + row * num_blocks + blocks, mask=exists, other=vocab_size)
    sums = tl.load(raw_sums + row * num_blocks + blocks, mask=exists, other=0.0)
    largest = tl.max(tops, axis=0)
    temperature = 1.0
    floor = float("-inf")
    if is_processed:
        own = tl.load(temperatures + row)
        if own > 0:
            temperature = own
            floor = tl.load(floors + row)
            sums = tl.load(kept_sums + row * num_blocks + blocks, mask=exists, other=0.0)
    log_total = tl.log(tl.sum(tl.where(exists, tl.exp(scaled(tops, largest, temperature)) * sums, 0.0), axis=0))

    chosen = tl.load(logits + tl.load(token_ids + row))
    tl.store(logprobs + row, _logprob(chosen, largest, temperature, floor, log_total))
    tl.store(ranks + row, 1)

    listed = count
    if is_asked:
        listed = tl.minimum(tl.load(asked + row).to(tl.int32), count)
    for index in range(listed):
        best = tl.max(tops, axis=0)
        # In a row with NaN no candidate may match: any id of the vocabulary will do, the row is faulty.
        best_id = tl.minimum(tl.min(tl.where(tops == best, candidates, vocab_size), axis=0), vocab_size - 1)
        tl.store(top_ids + row * count + index, best_id.to(tl.int64))
        tl.store(top_logprobs + row * count + index, _logprob(best, largest, temperature, floor, log_total))
        # What comes after it in its block: smaller, or equal with a higher id.
        winner = best_id // BLOCK
        ids = winner * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        is_left = (ids < vocab_size) & ((x < best) | ((x == best) & (ids > best_id)))
        following = tl.max(tl.where(is_left, x, float("-inf")), axis=0)
        following_id = tl.min(tl.where(is_left & (x == following), ids, vocab_size), axis=0)
        tops = tl.where(blocks == winner, following, tops)
        candidates = tl.where(blocks == winner, following_id, candidates)


@triton.jit
def _count_larger(
    logits: tl.tensor,
    block_largest: tl.tensor,
    token_ids: tl.tensor,
    ranks: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    chosen = tl.load(logits + tl.load(token_ids + row))
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    if tl.max(tops, axis=0) > chosen:
        ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + ids, mask=(tops > chosen)[:, None] & (ids < vocab_size), other=float("-inf"))
        larger = tl.sum(tl.sum((x > chosen).to(tl.int32), axis=1), axis=0)
        tl.atomic_add(ranks + row, larger, sem="relaxed")
