"""The draw: a race (Gumbel-max) in two levels, its noise keyed by seed, child, output position and token id.

    block of 256 ids   argmax over blocks of   log-sum-exp of the block  +  noise(seed, child, position, block)
    id in that block   argmax over its ids of  logit                     +  noise(seed, child, position, id)

Both levels are exact, so the token is an exact draw from softmax(logits), for under 1,000 numbers a row instead of one
per vocabulary entry. The noise is Philox4x32-10, a counter-based generator: the same integers wherever they are
computed, whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])  # 32-bit words, held in int64

BLOCK = 256
BLOCK_LEVEL, TOKEN_LEVEL = 0, 1
COIN_LEVEL, CODE_LEVEL = 2, 3  # decisions beside the draw have streams of their own
PREFIX_LEVEL = 4  # a number for every token after every prefix
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the two key words grow by from round to round
WORD_STEP = 2.0**-32  # from one 32-bit word to the next, where words are spread over 0 .. 1
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """What names each row's noise: int64 tensors (R, 1), every value a 32-bit word."""

    seed_low: Tensor
    seed_high: Tensor
    child: Tensor
    position: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], device: torch.device) -> NoiseKeys:
        """From (seed, child, position) of each row."""
        words = [noise_words(*row) for row in rows]
        return cls(*torch.tensor(words, dtype=torch.int64, device=device).view(-1, 4, 1).unbind(1))


NoiseOf = Callable[[NoiseKeys, Tensor, int, int], Tensor]  # keys, first (R, 1), count, level -> (R, count)


def noise_words(seed: int, child: int, position: int) -> tuple[int, int, int, int]:
    """What names a row's noise, as 32-bit words; the child's top bit tells a negative seed from its 64-bit twin."""
    return seed & _MASK, (seed >> 32) & _MASK, child | (1 << 31 if seed < 0 else 0), position


def philox(counter: tuple[Words, ...], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 on 32-bit words held in int64: four counter words and two key words to four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A 32 x 32 bit product may overflow int64's sign, but its bits are right: shift and mask give both halves.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _MASK, product0 & _MASK
        high1, low1 = (product1 >> 32) & _MASK, product1 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def coin(seed: int, child: int, position: int, level: int) -> float:
    """One number, evenly spread between 0 and 1."""
    *key, child_word, position_word = noise_words(seed, child, position)
    words = [np.array([word], np.int64) for word in (0, position_word, child_word, level, *key)]
    first = philox(tuple(words[:4]), (words[4], words[5]))[0]
    return (float(first[0]) + 0.5) * WORD_STEP


def prefix_keys(seed: int, prefixes: Sequence[Sequence[int]], device: torch.device) -> NoiseKeys:
    """What names the noise of all tokens after each of these prefixes: the seed and the prefix, whoever has it."""
    rows = [prefix_words(seed, prefix) for prefix in prefixes]
    words = torch.tensor(rows, dtype=torch.int64, device=device)[:, :, None]
    same = torch.ones_like(words[:, 0])
    return NoiseKeys(same * (seed & _MASK), same * ((seed >> 32) & _MASK), words[:, 0], words[:, 1])


def prefix_words(seed: int, prefix: Sequence[int]) -> tuple[int, int]:
    """What stands for child and position in the noise after a prefix: a digest of it."""
    named = np.asarray([seed < 0, *prefix], np.int64).tobytes()
    digest = hashlib.blake2b(named, digest_size=8).digest()
    return int.from_bytes(digest[:4]), int.from_bytes(digest[4:])


def gumbel(keys: NoiseKeys, first: Tensor, count: int, level: int) -> Tensor:
    """Noise for ids first .. first + count of each row; first (R, 1) is a multiple of 4. Returns (R, count) float32.

    Id i takes word i % 4 of the counter i // 4, so its noise does not depend on how many ids there are.
    """
    counters = first // 4 + torch.arange(-(-count // 4), device=first.device)
    counter = (counters, keys.position, keys.child, torch.full_like(keys.child, level))
    key = (keys.seed_low, keys.seed_high)
    if first.device.type == "cpu":  # for so few numbers numpy's operators take a third of the time of torch's
        words = philox(tuple(word.numpy() for word in counter), (key[0].numpy(), key[1].numpy()))
        stacked = torch.from_numpy(np.stack(words, axis=-1))
    else:
        stacked = torch.stack(philox(counter, key), dim=-1)
    integers = stacked.flatten(1)[:, :count]
    # float64 keeps the rare large values exact: they decide the race.
    uniform = (integers.double() + 0.5) * WORD_STEP
    return -torch.log(-torch.log(1.0 - uniform)).float()


def block_noise(keys: NoiseKeys, vocab_size: int, noise_of: NoiseOf = gumbel) -> Tensor:
    """(R, blocks): one number for every block of each row."""
    return noise_of(keys, torch.zeros_like(keys.child), -(-vocab_size // BLOCK), BLOCK_LEVEL)


def block_scores(logits: Tensor) -> Tensor:
    """(R, vocabulary) -> (R, blocks): the log-sum-exp of every block."""
    return _in_blocks(logits).logsumexp(-1)


def take_blocks(logits: Tensor, blocks: Tensor) -> Tensor:
    """The logits (R, 256) of one block of each row."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    return _in_blocks(logits)[rows, blocks]


def choose_tokens(inside: Tensor, blocks: Tensor, keys: NoiseKeys, noise_of: NoiseOf = gumbel) -> Tensor:
    """The second level: token ids (R,) from the logits (R, 256) of the chosen blocks."""
    first = blocks[:, None] * BLOCK
    return first[:, 0] + (inside + noise_of(keys, first, BLOCK, TOKEN_LEVEL)).argmax(-1)


def draw(logits: Tensor, keys: NoiseKeys) -> Tensor:
    """One token id per row of logits (R, vocabulary); minus infinity is never drawn."""
    blocks = (block_scores(logits) + block_noise(keys, logits.shape[1])).argmax(-1)
    return choose_tokens(take_blocks(logits, blocks), blocks, keys)


def _in_blocks(logits: Tensor) -> Tensor:
    """(R, vocabulary) -> (R, blocks, 256), padded with what is never drawn."""
    short = -logits.shape[1] % BLOCK
    padded = F.pad(logits, (0, short), value=-torch.inf) if short else logits
    return padded.view(logits.shape[0], -1, BLOCK)
