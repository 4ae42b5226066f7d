"""Attention with torch's operators: what rows share is read once, what is their own is read apart, then merged.

    shared   all rows of the sharers             x  their common leading blocks         one dense product
    past     the rows of one piece of a prompt   x  what its track computed earlier     one dense product
    self     the rows of that piece              x  its own positions                   causal
    own      single rows (decodes)               x  the rest of their tracks            padded, by length

Each part gives an output and the log-sum-exp of its scores; those two merge exactly, in float32:
o = (o1 e^l1 + o2 e^l2) / (e^l1 + e^l2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ramify.device.pool import KVPool
from ramify.device.reads import Int64s, Reads, SharingRule

SHARING = SharingRule(fewest_positions=256)  # below this a second part and a merge cost more than reading twice
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


class TorchAttention:
    def __init__(self) -> None:
        self._pool: KVPool | None = None
        self._parts: list[tuple[Part, bool]] = []  # and whether it is the first that its rows see

    # -- once a step -----------------------------------------------------------------------------------------

    def prepare(self, reads: Reads, pool: KVPool) -> None:
        self._pool = pool
        parts: list[Part] = []
        for prefix in reads.shared:
            sharers = sorted(prefix.sharers)
            rows = np.concatenate([_rows_of(reads, sharer) for sharer in sharers])
            table = reads.tables[sharers[0]][: prefix.num_blocks]
            parts.append(_Dense(_as_slice(rows), _as_slice(np.array(table)), prefix.num_blocks * reads.block_size))
        parts += _padded_parts(reads, np.flatnonzero(reads.num_rows == 1))
        for chunk in np.flatnonzero(reads.num_rows > 1).tolist():
            parts += _chunk_parts(reads, chunk)
        self._parts = _with_firsts([_for_all_layers(part, pool) for part in parts], reads.size)

    # -- once a layer ----------------------------------------------------------------------------------------

    def forward(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(T, heads, head_dim) to (T, heads * head_dim); the step's keys and values lie in the pool already."""
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


def _rows_of(reads: Reads, chunk: int) -> Int64s:
    return np.arange(reads.first_rows[chunk], reads.first_rows[chunk] + reads.num_rows[chunk])


def _chunk_parts(reads: Reads, chunk: int) -> Iterator[Part]:
    """A piece of a prompt sees itself, and what lies before it and is not read as a shared part."""
    first = int(reads.first_rows[chunk])
    rows = slice(first, first + int(reads.num_rows[chunk]))
    yield _Causal(rows)
    begin, start = int(reads.begins[chunk]), int(reads.ends[chunk]) - 1
    if start > begin:
        blocks = reads.tables[chunk][begin // reads.block_size : -(-start // reads.block_size)]
        yield _Dense(rows, _as_slice(np.array(blocks)), start - begin)


def _padded_parts(reads: Reads, singles: Int64s) -> Iterator[Part]:
    """Single rows in buckets of similar length, so that a short one is not padded to the longest of all."""
    lengths = reads.ends[singles] - reads.begins[singles]
    bucket: list[int] = []
    shortest = 0
    for chunk in singles[np.argsort(lengths, kind="stable")].tolist():
        blocks = len(reads.tables[chunk]) - int(reads.begins[chunk]) // reads.block_size
        if bucket and blocks > shortest + shortest // 2 + 2:
            yield _bucket(reads, bucket)
            bucket = []
        if not bucket:
            shortest = blocks
        bucket.append(chunk)
    if bucket:
        yield _bucket(reads, bucket)


def _bucket(reads: Reads, bucket: list[int]) -> Part:
    bucket = sorted(bucket)
    tables = [reads.tables[chunk][reads.begins[chunk] // reads.block_size :] for chunk in bucket]
    lengths = reads.ends[bucket] - reads.begins[bucket]
    if len(bucket) == 1:  # nothing to pad, nothing to mask, and often nothing to copy
        row = int(reads.first_rows[bucket[0]])
        return _Dense(slice(row, row + 1), _as_slice(np.array(tables[0])), int(lengths[0]))
    longest = max(map(len, tables))
    # Padding repeats the row's own last block: any block that holds numbers will do behind the mask.
    padded = np.array([table + (table[-1],) * (longest - len(table)) for table in tables])
    mask = np.where(np.arange(longest * reads.block_size) < lengths[:, None], 0.0, -np.inf).astype(np.float32)
    return _Padded(
        _as_slice(reads.first_rows[bucket]),
        torch.from_numpy(padded.reshape(-1)),
        torch.from_numpy(mask)[:, None, None],
    )


def _as_slice(numbers: Int64s) -> slice | Tensor:
    """Consecutive numbers as a slice (a view instead of a copy), others as an index."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers)
