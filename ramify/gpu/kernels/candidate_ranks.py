"""The ranks of beams' candidates: of each, 1 + how many logits of its row are larger. One read serves all of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.race import BLOCK, BlockScores

BLOCKS_AT_ONCE = tl.constexpr(16)  # that one program reads


def rank_candidates(logits: Tensor, scores: BlockScores, token_ids: Tensor, ranks: Tensor) -> None:
    """Of logits (R, V) float32 and their scores: token_ids (R, count) int64 -> ranks (R, count) int32, from 1.

    Tokens that tie share the best rank.
    """
    rows, vocab_size = logits.shape
    num_blocks, count = scores.largest.shape[1], token_ids.shape[1]
    ranks.fill_(1)
    # Whole numbers add up to the same in any order, so many programs may count for one row.
    _count_larger_than_each[(rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE.value))](
        logits,
        scores.largest,
        token_ids,
        ranks,
        logits.stride(0),
        count,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        num_warps=4,
    )


@triton.jit
def _count_larger_than_each(
    logits: tl.tensor,
    block_largest: tl.tensor,
    token_ids: tl.tensor,
    ranks: tl.tensor,
    logits_stride: tl.tensor,
    count: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    top = tl.max(
        tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")), axis=0
    )
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    for index in range(count):
        chosen = tl.load(logits + tl.load(token_ids + row * count + index))
        if top > chosen:
            larger = tl.sum(tl.sum((x > chosen).to(tl.int32), axis=1), axis=0)
            tl.atomic_add(ranks + row * count + index, larger, sem="relaxed")
