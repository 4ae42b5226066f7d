"""The draw of `sampling/draw.py` on the GPU: one pass over the logits, then a race per row.

    score_blocks   (rows x chunks)   logits -> of every block of 256 ids: largest, its lowest id, two sums
    keep_above     (rows x chunks)   the sums again, without what is below a row's floor; reads few blocks
    draw_tokens    (rows)            blocks race, then the ids of the winner; greedy rows take the largest

A block's sums are relative to its own largest logit m, so one pass is enough and nothing overflows:

    raw_sums = sum of exp(x - m)         sums = sum of exp((x - m) / temperature)

The noise is the same Philox4x32-10 as in torch, integer for integer, its logarithms in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.sampling import draw as truth

BLOCK = tl.constexpr(truth.BLOCK)
BLOCK_LEVEL = tl.constexpr(truth.BLOCK_LEVEL)
TOKEN_LEVEL = tl.constexpr(truth.TOKEN_LEVEL)
ROUNDS = tl.constexpr(truth.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, truth.MULTIPLIERS)
WEYL_0, WEYL_1 = map(tl.constexpr, truth.WEYL)
WORD_STEP = tl.constexpr(truth.WORD_STEP)

BLOCKS_AT_ONCE = tl.constexpr(8)  # a program of score_blocks or keep_above reads 2,048 logits
LEAST_WIDTH = 16
# The smallest normal float32. `processors.temperature` divides by 1e-38 at least, which a GPU would flush to zero.
COLDEST = tl.constexpr(1.1754943508222875e-38)
LOG2_E = tl.constexpr(1.4426950408889634)

SOUND, NOT_FINITE, NOTHING_LEFT = 0, 1, 2  # what draw_tokens says of a row, as the host reads it
_SOUND, _NOT_FINITE, _NOTHING_LEFT = map(tl.constexpr, (SOUND, NOT_FINITE, NOTHING_LEFT))


class BlockScores(NamedTuple):
    """What one pass leaves of the logits, all (R, blocks)."""

    largest: Tensor  # float32
    largest_ids: Tensor  # int32: the id of the largest logit, the lowest of those that tie
    raw_sums: Tensor  # float32: at temperature 1, of all ids
    sums: Tensor  # float32: at the row's temperature, of the ids that filters left; 0 where none is left

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> BlockScores:
        shape = (rows, triton.cdiv(vocab_size, truth.BLOCK))
        floats = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)]
        return cls(floats[0], torch.empty(shape, dtype=torch.int32, device=device), floats[1], floats[2])

    def of(self, rows: int) -> BlockScores:
        """The first so many rows."""
        return BlockScores(*(part[:rows] for part in self))


class KeyWords(NamedTuple):
    """What names each row's noise: (R,) int32 or int64 each, 32-bit words as `NoiseKeys.of` makes them."""

    seed_low: Tensor
    seed_high: Tensor
    child: Tensor  # the top bit tells a negative seed from its 64-bit twin
    position: Tensor


def score_blocks(logits: Tensor, temperatures: Tensor, scores: BlockScores) -> None:
    """logits (R, V) float32, temperatures (R,) float32 (0: greedy) -> scores, nothing left out."""
    rows, vocab_size = logits.shape
    num_blocks = scores.largest.shape[1]
    _score_blocks[(rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE.value))](
        logits,
        temperatures,
        *scores,
        logits.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        num_warps=4,
    )


def keep_above(logits: Tensor, temperatures: Tensor, floors: Tensor, scores: BlockScores) -> None:
    """Rewrites scores.sums of the ids whose logit is at least floors (R,); a block below its floor is not read."""
    rows, vocab_size = logits.shape
    num_blocks = scores.largest.shape[1]
    _keep_above[(rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE.value))](
        logits,
        temperatures,
        floors,
        scores.largest,
        scores.sums,
        logits.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        num_warps=4,
    )


def draw_tokens(
    logits: Tensor,
    temperatures: Tensor,
    keys: KeyWords,
    scores: BlockScores,
    *,
    token_ids: Tensor,
    logprobs: Tensor,
    faults: Tensor,
    floors: Tensor | None = None,
    raw: tuple[Tensor, BlockScores] | None = None,
) -> None:
    """Draws from logits (R, V) and their scores, into token_ids (R,) int64, logprobs (R,) float32, faults (R,) int32.

    floors are those that keep_above was given. Logprobs are the model's own: of `raw`, the logits (R, V) and scores
    from before any control; by default of these logits themselves. faults: SOUND, NOT_FINITE or NOTHING_LEFT; the
    token of a faulty row is some id of the vocabulary.
    """
    rows, vocab_size = logits.shape
    num_blocks = scores.largest.shape[1]
    raw_logits, raw_scores = (logits, scores) if raw is None else raw
    _draw_tokens[(rows,)](
        logits,
        temperatures,
        temperatures if floors is None else floors,
        *keys,
        scores.largest,
        scores.largest_ids,
        scores.sums,
        raw_logits,
        raw_scores.largest,
        raw_scores.raw_sums,
        token_ids,
        logprobs,
        faults,
        logits.stride(0),
        raw_logits.stride(0),
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        width=width_of(num_blocks),
        has_floors=floors is not None,
        num_warps=4,
    )


def width_of(num_blocks: int) -> int:
    """How many lanes hold the blocks of a row: a power of two."""
    width: int = max(triton.next_power_of_2(num_blocks), LEAST_WIDTH)
    return width


@triton.jit
def philox(c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, k0: tl.tensor, k1: tl.tensor) -> tl.tensor:
    """Philox4x32-10 in uint32: four counter words and two key words to four random words."""
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, MULTIPLIER_0), c0 * MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, MULTIPLIER_1), c2 * MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0, c1, c2, c3


@triton.jit
def random_words(
    first: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    child: tl.tensor,
    position: tl.tensor,
    level: tl.constexpr,
    count: tl.constexpr,
) -> tl.tensor:
    """uint32 (count,) of ids first .. first + count, first a multiple of 4: id i takes word i % 4 of counter i // 4."""
    quarter: tl.constexpr = count // 4
    counters = (first // 4 + tl.arange(0, quarter)).to(tl.uint32)
    nothing = counters * 0
    w0, w1, w2, w3 = philox(
        counters,
        nothing + position.to(tl.uint32),
        nothing + child.to(tl.uint32),
        nothing + level,
        nothing + seed_low.to(tl.uint32),
        nothing + seed_high.to(tl.uint32),
    )
    # (quarter, 2, 2): read along its last two axes it says w0, w1, w2, w3
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (count,))


@triton.jit
def gumbel(words: tl.tensor) -> tl.tensor:
    """Random words to float32 noise; float64 keeps the rare large values exact, which decide the race."""
    uniform = (words.to(tl.float64) + 0.5) * WORD_STEP
    return (-tl.log(-tl.log(1.0 - uniform))).to(tl.float32)


@triton.jit
def scaled(x: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(x - largest) / temperature, at most 0, for every x up to a finite largest."""
    # Exact division: the approximate one makes NaN of minus infinity over a very large number.
    return tl.div_rn(x - largest, tl.maximum(temperature, COLDEST) + tl.zeros_like(x))


@triton.jit
def weights_of(x: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((x - largest) / temperature), rounded by less than a sum of them is: a product takes a third of the time."""
    return tl.exp2((x - largest) * tl.div_rn(LOG2_E, tl.maximum(temperature, COLDEST)))


@triton.jit
def store_scores(
    x: tl.tensor,
    ids: tl.tensor,
    temperature: tl.tensor,
    blocks: tl.tensor,
    row: tl.tensor,
    largest: tl.tensor,
    largest_ids: tl.tensor,
    raw_sums: tl.tensor,
    sums: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
) -> None:
    """The block scores of some blocks of a row: their logits x and ids are (blocks, BLOCK)."""
    top = tl.max(x, axis=1)
    top_id = tl.min(tl.where(x == top[:, None], ids, vocab_size - 1), axis=1)
    # A block of nothing but minus infinity is empty: its sums are 0, not NaN.
    base = tl.where(top == float("-inf"), 0.0, top)[:, None]
    raw_sum = tl.sum(tl.exp(x - base), axis=1)
    kept_sum = tl.sum(weights_of(x, base, temperature), axis=1)
    target = row * num_blocks + blocks
    inside = blocks < num_blocks
    tl.store(largest + target, top, mask=inside)
    tl.store(largest_ids + target, top_id, mask=inside)
    tl.store(raw_sums + target, raw_sum, mask=inside)
    tl.store(sums + target, kept_sum, mask=inside)


@triton.jit
def _score_blocks(
    logits: tl.tensor,
    temperatures: tl.tensor,
    largest: tl.tensor,
    largest_ids: tl.tensor,
    raw_sums: tl.tensor,
    sums: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    store_scores(
        x, ids, temperature, blocks, row, largest, largest_ids, raw_sums, sums, vocab_size, num_blocks
    )  # fmt: skip


@triton.jit
def _keep_above(
    logits: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + row)
    if floor > float("-inf"):
        blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
        inside = blocks < num_blocks
        target = row * num_blocks + blocks
        top = tl.load(largest + target, mask=inside, other=float("-inf"))
        ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        if tl.max(top, axis=0) >= floor:
            read = (top >= floor)[:, None] & (ids < vocab_size)
            x = tl.load(logits + row * logits_stride + ids, mask=read, other=float("-inf"))
            base = tl.where(top == float("-inf"), 0.0, top)[:, None]
            weights = weights_of(x, base, tl.load(temperatures + row))
            tl.store(sums + target, tl.sum(tl.where(x >= floor, weights, 0.0), axis=1), mask=inside)
        else:
            tl.store(sums + target, tl.zeros((BLOCKS_AT_ONCE,), tl.float32), mask=inside)


@triton.jit
def _draw_tokens(
    logits: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    seeds_low: tl.tensor,
    seeds_high: tl.tensor,
    children: tl.tensor,
    positions: tl.tensor,
    largest: tl.tensor,
    largest_ids: tl.tensor,
    sums: tl.tensor,
    raw_logits: tl.tensor,
    raw_largest: tl.tensor,
    raw_sums: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    faults: tl.tensor,
    logits_stride: tl.tensor,
    raw_logits_stride: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    has_floors: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, width)
    inside = blocks < num_blocks
    tops = tl.load(largest + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    top = tl.max(tops, axis=0)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        seed_low, seed_high = tl.load(seeds_low + row), tl.load(seeds_high + row)
        child, position = tl.load(children + row), tl.load(positions + row)
        kept = tl.load(sums + row * num_blocks + blocks, mask=inside, other=0.0)
        # log(0) is minus infinity: a block with nothing left never wins. Nor does one with NaN: its row is faulty.
        score = scaled(tops, top, temperature) + tl.log(kept)
        score += gumbel(random_words(0, seed_low, seed_high, child, position, BLOCK_LEVEL, width))
        score = tl.where(score > float("-inf"), score, float("-inf"))
        winner = tl.minimum(tl.argmax(score, axis=0), num_blocks - 1)
        ids = winner * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        score = scaled(x, top, temperature)
        score += gumbel(random_words(winner * BLOCK, seed_low, seed_high, child, position, TOKEN_LEVEL, BLOCK))
        if has_floors:
            score = tl.where(x >= tl.load(floors + row), score, float("-inf"))
        score = tl.where(score > float("-inf"), score, float("-inf"))
        token = winner * BLOCK + tl.argmax(score, axis=0)
    else:
        top_ids = tl.load(largest_ids + row * num_blocks + blocks, mask=inside, other=vocab_size)
        token = tl.min(tl.where(tops == top, top_ids, vocab_size), axis=0)
    token = tl.minimum(token, vocab_size - 1)

    raw_tops = tl.load(raw_largest + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    raw_kept = tl.load(raw_sums + row * num_blocks + blocks, mask=inside, other=0.0)
    raw_top = tl.max(raw_tops, axis=0)
    normaliser = raw_top + tl.log(tl.sum(tl.where(inside, tl.exp(raw_tops - raw_top) * raw_kept, 0.0), axis=0))
    chosen = tl.load(raw_logits + row * raw_logits_stride + token)
    fault = tl.where(top == float("-inf"), _NOTHING_LEFT, _SOUND)
    # Both comparisons fail for NaN.
    finite = (normaliser > float("-inf")) & (normaliser < float("inf"))
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(faults + row, tl.where(finite, fault, _NOT_FINITE))
