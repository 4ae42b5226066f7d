"""Attention on a CPU: what rows share is read once, what is their own is read apart, and the parts are merged.

    shared   all queries of a group of sequences    x  their common leading blocks         one dense product
    past     the queries of one chunk of a prompt   x  what its track computed earlier     one dense product
    self     the queries of that chunk              x  its own positions                   causal
    own      single queries (decodes)               x  the rest of their tracks            padded, by length

Each part gives an output and the log-sum-exp of its scores; those two merge exactly, in float32:
o = (o1 e^l1 + o2 e^l2) / (e^l1 + e^l2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ramify.attention.slots import IntArray, slots_of
from ramify.kv.pool import KVPool
from ramify.plan import Chunk, SharedPrefix

FEWEST_SHARED_TOKENS = 256  # below this a second part and a merge cost more than reading twice
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # resolved once, not at every call


@dataclass(frozen=True, slots=True)
class _Dense:
    """Rows that all see the same positions: the first `length` of these blocks, as views where they are neighbours."""

    rows: slice | Tensor
    blocks: slice | Tensor
    length: int
    views: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None  # keys and values by layer


@dataclass(frozen=True, slots=True)
class _Causal:
    """Rows of one chunk that see themselves and those before them, straight from the step's keys and values."""

    rows: slice


@dataclass(frozen=True, slots=True)
class _Padded:
    """Single rows with blocks of their own, padded to the longest; the mask is minus infinity past each one's end."""

    rows: slice | Tensor
    blocks: Tensor  # (B * longest,)
    mask: Tensor  # (B, 1, 1, longest * block_size)


Part = _Dense | _Causal | _Padded


class GroupedAttention:
    def __init__(self, fewest_shared_tokens: int = FEWEST_SHARED_TOKENS) -> None:
        self._fewest_shared_tokens = fewest_shared_tokens
        self._pool: KVPool | None = None
        self._slots = torch.empty(0, dtype=torch.long)
        self._parts: list[tuple[Part, bool]] = []  # and whether it is the first that its rows see

    # -- once a step -----------------------------------------------------------------------------------------

    def prepare(self, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix], pool: KVPool) -> None:
        self._pool = pool
        size = pool.block_size
        starts = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])
        self._slots = torch.from_numpy(np.concatenate([slots_of(chunk, size, chunk.start) for chunk in chunks]))
        covered = [0] * len(chunks)  # blocks of each chunk that a group reads for it
        parts: list[Part] = []
        for group in shared:
            if (len(group.chunks) - 1) * group.num_blocks * size < self._fewest_shared_tokens:
                continue
            for index in group.chunks:
                covered[index] = group.num_blocks
            rows = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in sorted(group.chunks)])
            table = chunks[group.chunks[0]].block_table[: group.num_blocks]
            parts.append(_Dense(_as_slice(rows), _as_slice(np.array(table)), group.num_blocks * size))
        singles = [index for index, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
        parts += _padded_parts(chunks, singles, covered, starts, size)
        for index, chunk in enumerate(chunks):
            if len(chunk.token_ids) > 1:
                parts += _chunk_parts(chunk, covered[index], int(starts[index]), size)
        self._parts = _with_firsts([_for_all_layers(part, pool) for part in parts], int(starts[-1]))

    # -- once a layer ----------------------------------------------------------------------------------------

    def forward(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self._pool is not None, "prepare comes first"
        self._pool.write(layer, self._slots, keys, values)
        merged = _Merge(queries)
        for part, first in self._parts:
            match part:
                case _Dense():
                    output, scores = self._dense(layer, queries[part.rows], part)
                case _Padded():
                    output, scores = self._padded(layer, queries[part.rows], part)
                case _Causal():
                    output, scores = _causal(queries[part.rows], keys[part.rows], values[part.rows])
            merged.add(part.rows, output, scores, first)
        return merged.output.flatten(1)

    def _dense(self, layer: int, queries: Tensor, part: _Dense) -> tuple[Tensor, Tensor]:
        assert self._pool is not None
        rows, heads, head_dim = queries.shape
        if part.views is not None:
            keys, values = part.views[0][layer], part.views[1][layer]  # (1, kv_heads, length, head_dim)
        else:
            assert isinstance(part.blocks, Tensor)
            seen = self._pool.layer_blocks[layer].index_select(0, part.blocks).flatten(0, 1)[: part.length]
            keys, values = seen.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        kv_heads = keys.shape[1]
        # Heads that share keys become further queries: one product per key-value head.
        q = queries.view(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
        output, scores = _attend(q, keys, values)
        output = output.view(kv_heads, rows, -1, head_dim).transpose(0, 1).reshape(rows, heads, head_dim)
        return output, scores.view(kv_heads, rows, -1).transpose(0, 1).reshape(rows, heads)

    def _padded(self, layer: int, queries: Tensor, part: _Padded) -> tuple[Tensor, Tensor]:
        assert self._pool is not None
        rows, heads, head_dim = queries.shape
        seen = self._pool.layer_blocks[layer].index_select(0, part.blocks)
        kv = seen.view(rows, -1, *seen.shape[2:]).permute(2, 0, 3, 1, 4)  # (2, B, kv_heads, longest, head_dim)
        q = queries.view(rows, kv.shape[2], -1, head_dim)
        output, scores = _attend(q, kv[0], kv[1], attn_mask=part.mask)
        return output.reshape(rows, heads, head_dim), scores.reshape(rows, heads)


class _Merge:
    """Collects the parts of every row; the first part of a row is taken as it is."""

    def __init__(self, queries: Tensor) -> None:
        self._shape = queries.shape
        self._whole = slice(0, queries.shape[0])
        self.output: Tensor = queries
        self._scores: Tensor | None = None

    def add(self, rows: slice | Tensor, output: Tensor, scores: Tensor, first: bool) -> None:
        if isinstance(rows, slice) and rows == self._whole:
            if self._scores is not None:
                output, scores = _merged(self.output, self._scores, output, scores)
            self.output, self._scores = output, scores
            return
        if self._scores is None:
            self.output = output.new_zeros(self._shape)
            self._scores = scores.new_full(self._shape[:2], -torch.inf)
        if not first:
            output, scores = _merged(self.output[rows], self._scores[rows], output, scores)
        self.output[rows], self._scores[rows] = output, scores


def _for_all_layers(part: Part, pool: KVPool) -> Part:
    """What every layer of a step needs alike: views of neighbouring blocks, a mask in the model's precision."""
    if isinstance(part, _Dense) and isinstance(part.blocks, slice):
        return replace(part, views=pool.views(part.blocks, part.length))
    if isinstance(part, _Padded):
        return replace(part, mask=part.mask.to(pool.kv.dtype))
    return part


def _with_firsts(parts: Sequence[Part], num_rows: int) -> list[tuple[Part, bool]]:
    """Every part, and whether none of its rows was in an earlier one: it then need not be merged with anything."""
    seen = np.zeros(num_rows, dtype=bool)
    marked = []
    for part in parts:
        rows = part.rows if isinstance(part.rows, slice) else part.rows.numpy()
        marked.append((part, not seen[rows].any()))
        seen[rows] = True
    return marked


def _merged(one: Tensor, one_scores: Tensor, other: Tensor, other_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions over disjoint positions to one over all of them; scores are (rows, heads)."""
    # sigmoid(l2 - l1) is the second part's weight; a part that saw nothing (minus infinity) weighs nothing.
    weight = torch.sigmoid(other_scores - one_scores)
    output = torch.lerp(one.float(), other.float(), weight[..., None]).to(one.dtype)
    return output, torch.logaddexp(one_scores, other_scores)


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    # Fewer heads of keys than of queries: the operator lets neighbouring queries share them.
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    output, scores = _attend(q, k, v, 0.0, True)
    return output[0].transpose(0, 1), scores[0].transpose(0, 1)


def _chunk_parts(chunk: Chunk, covered: int, row: int, block_size: int) -> Iterator[Part]:
    """A chunk of a prompt sees itself, and what lies before it and is read by no group."""
    rows = slice(row, row + len(chunk.token_ids))
    yield _Causal(rows)
    length = chunk.start - covered * block_size
    if length:
        blocks = np.array(chunk.block_table[covered : covered - (-length // block_size)])
        yield _Dense(rows, _as_slice(blocks), length)


def _padded_parts(
    chunks: Sequence[Chunk], singles: Sequence[int], covered: Sequence[int], starts: IntArray, block_size: int
) -> Iterator[Part]:
    """Single rows in buckets of similar length, so that a short one is not padded to the longest of all."""
    by_length = sorted(singles, key=lambda index: chunks[index].end - covered[index] * block_size)
    bucket: list[int] = []
    shortest = 0
    for index in by_length:
        blocks = len(chunks[index].block_table) - covered[index]
        if bucket and blocks > shortest + shortest // 2 + 2:
            yield _bucket(chunks, bucket, covered, starts, block_size)
            bucket = []
        if not bucket:
            shortest = blocks
        bucket.append(index)
    if bucket:
        yield _bucket(chunks, bucket, covered, starts, block_size)


def _bucket(
    chunks: Sequence[Chunk], bucket: list[int], covered: Sequence[int], starts: IntArray, block_size: int
) -> Part:
    bucket = sorted(bucket)
    tables = [chunks[index].block_table[covered[index] :] for index in bucket]
    if len(bucket) == 1:  # nothing to pad, nothing to mask, and often nothing to copy
        row = int(starts[bucket[0]])
        length = chunks[bucket[0]].end - covered[bucket[0]] * block_size
        return _Dense(slice(row, row + 1), _as_slice(np.array(tables[0])), length)
    longest = max(map(len, tables))
    # Padding repeats the row's own last block: any block that holds numbers will do behind the mask.
    padded = np.array([table + (table[-1],) * (longest - len(table)) for table in tables])
    lengths = np.array([chunks[index].end - covered[index] * block_size for index in bucket])
    mask = np.where(np.arange(longest * block_size) < lengths[:, None], 0.0, -np.inf).astype(np.float32)
    return _Padded(
        _as_slice(starts[bucket]), torch.from_numpy(padded.reshape(-1)), torch.from_numpy(mask)[:, None, None]
    )


def _as_slice(numbers: IntArray) -> slice | Tensor:
    """Consecutive numbers as a slice (a view instead of a copy), others as an index."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers)
