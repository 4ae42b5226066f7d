"""What draws without replacement are ranked by: every token's logprob with a number of its own, keyed by the prefix.

The numbers are those of `sampling/draw.py` (`prefix_keys`), integer for integer; other rows get none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.race import BLOCK, BlockScores, KeyWords, gumbel, random_words, scaled, width_of
from ramify.sampling import draw as truth

PREFIX_LEVEL = tl.constexpr(truth.PREFIX_LEVEL)


def add_prefix_noise(
    logits: Tensor,
    temperatures: Tensor,
    floors: Tensor,
    scores: BlockScores,
    keys: KeyWords,
    is_distinct: Tensor,
    *,
    noisy: Tensor,
) -> None:
    """logits (R, V) -> noisy (R, V): their distance from the largest at temperatures (R,), minus infinity below floors
    (R,); with noise in rows that are drawn without replacement, is_distinct (R,) float32."""
    rows, vocab_size = logits.shape
    num_blocks = scores.largest.shape[1]
    _add_prefix_noise[(rows, num_blocks)](
        logits,
        temperatures,
        floors,
        scores.largest,
        *keys,
        is_distinct,
        noisy,
        logits.stride(0),
        noisy.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        width=width_of(num_blocks),
        num_warps=4,
    )


@triton.jit
def _add_prefix_noise(
    logits: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    block_largest: tl.tensor,
    seeds_low: tl.tensor,
    seeds_high: tl.tensor,
    children: tl.tensor,
    positions: tl.tensor,
    is_distinct: tl.tensor,
    noisy: tl.tensor,
    logits_stride: tl.tensor,
    noisy_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.arange(0, width)
    tops = tl.load(block_largest + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    ranked = scaled(x, tl.max(tops, axis=0), tl.load(temperatures + row))
    if tl.load(is_distinct + row) > 0:
        seed_low, seed_high = tl.load(seeds_low + row), tl.load(seeds_high + row)
        child, position = tl.load(children + row), tl.load(positions + row)
        ranked += gumbel(random_words(block * BLOCK, seed_low, seed_high, child, position, PREFIX_LEVEL, BLOCK))
    ranked = tl.where(x >= tl.load(floors + row), ranked, float("-inf"))
    tl.store(noisy + row * noisy_stride + ids, ranked, mask=ids < vocab_size)
