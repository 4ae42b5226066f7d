"""Penalties, bias and bans on the GPU: raw logits to controlled ones, in one pass that also scores both.

    match_words      (rows)            bad words whose beginning was just written: their last tokens become entries
    control_blocks   (rows x chunks)   raw logits -> controlled logits, and the block scores (race.py) of both
    count_drawn      (rows)            what was drawn is seen from now on

A slot holds what one sequence's controls look at (`ControlTables`). An entry is a token, an amount that is added to its
logit (minus infinity bans it) and the output position until which it holds. Entries are sorted by token, and `starts`
says where those of each chunk of the vocabulary begin, so every entry is read once. `seen` counts: how often the output
has a token, in steps of SEEN_ONCE, and a bit for each track whose prompt has it. The truth is `sampling/processors.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.engine.demands import LONGEST_BAD_WORD, MOST_BAD_WORDS, MOST_ENTRIES
from ramify.gpu.kernels.race import BLOCK, BLOCKS_AT_ONCE, BlockScores, store_scores

CHUNK = BLOCK.value * BLOCKS_AT_ONCE.value  # ids that one program controls
HISTORY = LONGEST_BAD_WORD - 1  # last tokens that a slot knows in their order; a power of two
ALWAYS = 2**31 - 1  # no output comes so far

SEEN_ONCE = tl.constexpr(4)  # two bits below it are the prompts' of up to two tracks
ALLOWS_SOME, PENALISES = tl.constexpr(1), tl.constexpr(2)  # bits of `flags`
_HISTORY, _MOST_WORDS, _MOST_ENTRIES = map(tl.constexpr, (HISTORY, MOST_BAD_WORDS, MOST_ENTRIES))
REPETITION, FREQUENCY, PRESENCE = range(3)  # columns of `penalties`
NUM_PENALTIES = tl.constexpr(3)


class ControlTables(NamedTuple):
    """Of S slots, on the device."""

    flags: Tensor  # (S,) int32
    penalties: Tensor  # (S, 3) float32
    starts: Tensor  # (S, chunks + 1) int32: among the entries, the first of each chunk
    entry_ids: Tensor  # (S, MOST_ENTRIES) int32, ascending
    entry_amounts: Tensor  # (S, MOST_ENTRIES) float32
    entry_ends: Tensor  # (S, MOST_ENTRIES) int32: holds at output positions below
    allowed: Tensor  # (S, vocabulary / 32) int32: a bit for each token
    word_lengths: Tensor  # (S, MOST_BAD_WORDS) int32: of the beginning, without the last token; 0: no word
    word_tokens: Tensor  # (S, MOST_BAD_WORDS, HISTORY) int32: the beginning, its last token first
    word_entries: Tensor  # (S, MOST_BAD_WORDS) int32: the entry that bans the last token
    history: Tensor  # (S, HISTORY) int32: the token of output position p is at p % HISTORY
    seen: Tensor  # (S, vocabulary) int32

    @classmethod
    def empty(cls, slots: int, vocab_size: int, device: torch.device) -> ControlTables:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=torch.int32, device=device)

        return cls(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, NUM_PENALTIES.value, device=device),
            integers(triton.cdiv(vocab_size, CHUNK) + 1),
            integers(MOST_ENTRIES),
            torch.zeros(slots, MOST_ENTRIES, device=device),
            integers(MOST_ENTRIES),
            integers(triton.cdiv(vocab_size, 32)),
            integers(MOST_BAD_WORDS),
            integers(MOST_BAD_WORDS, HISTORY),
            integers(MOST_BAD_WORDS),
            integers(HISTORY),
            integers(vocab_size),
        )


def match_words(slots: Tensor, positions: Tensor, tables: ControlTables) -> None:
    """Sets the ends of the entries of bad words: slots (R,), negative where a row has none; positions (R,)."""
    _match_words[(slots.shape[0],)](
        slots,
        positions,
        tables.word_lengths,
        tables.word_tokens,
        tables.word_entries,
        tables.entry_ends,
        tables.history,
        num_warps=4,
    )


def control_blocks(
    raw: Tensor,
    temperatures: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: ControlTables,
    *,
    track: int,
    controlled: Tensor,
    raw_scores: BlockScores,
    scores: BlockScores,
) -> None:
    """raw (R, V) float32 -> controlled (R, V) float32, and the scores of both; `track` says whose prompt counts."""
    rows, vocab_size = raw.shape
    num_blocks = scores.largest.shape[1]
    _control_blocks[(rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE.value))](
        raw,
        controlled,
        temperatures,
        slots,
        positions,
        tables.flags,
        tables.penalties,
        tables.starts,
        tables.entry_ids,
        tables.entry_amounts,
        tables.entry_ends,
        tables.allowed,
        tables.seen,
        *raw_scores,
        *scores,
        raw.stride(0),
        controlled.stride(0),
        track,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        num_starts=tables.starts.shape[1],
        num_words=tables.allowed.shape[1],
        seen_width=tables.seen.shape[1],
        num_warps=4,
    )


def count_drawn(token_ids: Tensor, slots: Tensor, positions: Tensor, tables: ControlTables) -> None:
    """token_ids (R,) int64 were drawn for these slots at these output positions. No slot occurs twice."""
    _count_drawn[(token_ids.shape[0],)](
        token_ids, slots, positions, tables.history, tables.seen, seen_width=tables.seen.shape[1], num_warps=1
    )


@triton.jit
def _match_words(
    slots: tl.tensor,
    positions: tl.tensor,
    word_lengths: tl.tensor,
    word_tokens: tl.tensor,
    word_entries: tl.tensor,
    entry_ends: tl.tensor,
    history: tl.tensor,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        position = tl.load(positions + row).to(tl.int32)
        words = slot * _MOST_WORDS + tl.arange(0, _MOST_WORDS)
        lengths = tl.load(word_lengths + words)
        matches = lengths <= position
        for back in range(_HISTORY):
            at = (position - 1 - back + _HISTORY) % _HISTORY
            written = tl.load(history + slot * _HISTORY + tl.maximum(at, 0))
            wanted = tl.load(word_tokens + words * _HISTORY + back)
            matches = matches & ((back >= lengths) | (wanted == written))
        entries = slot * _MOST_ENTRIES + tl.load(word_entries + words)
        tl.store(entry_ends + entries, tl.where(matches, position + 1, 0), mask=lengths > 0)


@triton.jit
def _control_blocks(
    raw: tl.tensor,
    controlled: tl.tensor,
    temperatures: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    flags: tl.tensor,
    penalties: tl.tensor,
    starts: tl.tensor,
    entry_ids: tl.tensor,
    entry_amounts: tl.tensor,
    entry_ends: tl.tensor,
    allowed: tl.tensor,
    seen: tl.tensor,
    raw_largest: tl.tensor,
    raw_largest_ids: tl.tensor,
    raw_raw_sums: tl.tensor,
    raw_kept_sums: tl.tensor,
    largest: tl.tensor,
    largest_ids: tl.tensor,
    raw_sums: tl.tensor,
    sums: tl.tensor,
    raw_stride: tl.tensor,
    controlled_stride: tl.tensor,
    track: tl.tensor,
    vocab_size: tl.constexpr,
    num_blocks: tl.constexpr,
    num_starts: tl.constexpr,
    num_words: tl.constexpr,
    seen_width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    blocks = chunk * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_id = ids < vocab_size
    x = tl.load(raw + row * raw_stride + ids, mask=is_id, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    store_scores(
        x, ids, temperature, blocks, row, raw_largest, raw_largest_ids, raw_raw_sums, raw_kept_sums,
        vocab_size, num_blocks,
    )  # fmt: skip
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        position = tl.load(positions + row).to(tl.int32)
        flag = tl.load(flags + slot)
        if (flag & ALLOWS_SOME) != 0:
            words = tl.load(allowed + slot * num_words + ids // 32, mask=is_id, other=0)
            x = tl.where(((words >> (ids % 32)) & 1) != 0, x, float("-inf"))
        first = tl.load(starts + slot * num_starts + chunk)
        last = tl.load(starts + slot * num_starts + chunk + 1)
        for entry in range(first, last):
            where = slot * _MOST_ENTRIES + entry
            holds = position < tl.load(entry_ends + where)
            hit = (ids == tl.load(entry_ids + where)) & holds
            x = tl.where(hit, x + tl.load(entry_amounts + where), x)
        if (flag & PENALISES) != 0:
            repetition = tl.load(penalties + slot * NUM_PENALTIES)
            frequency = tl.load(penalties + slot * NUM_PENALTIES + 1)
            presence = tl.load(penalties + slot * NUM_PENALTIES + 2)
            marks = tl.load(seen + slot * seen_width + ids, mask=is_id, other=0)
            count = marks // SEEN_ONCE
            repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
            x = tl.where((count > 0) | (((marks >> track) & 1) != 0), repeated, x)
            x = tl.where(count > 0, x - (count.to(tl.float32) * frequency + presence), x)
    tl.store(controlled + row * controlled_stride + ids, x, mask=is_id)
    store_scores(
        x, ids, temperature, blocks, row, largest, largest_ids, raw_sums, sums, vocab_size, num_blocks
    )  # fmt: skip


@triton.jit
def _count_drawn(
    token_ids: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    history: tl.tensor,
    seen: tl.tensor,
    seen_width: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        token = tl.load(token_ids + row)
        position = tl.load(positions + row).to(tl.int32)
        tl.store(history + slot * _HISTORY + position % _HISTORY, token.to(tl.int32))
        mark = seen + slot * seen_width + token
        tl.store(mark, tl.load(mark) + SEEN_ONCE)
