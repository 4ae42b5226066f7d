"""A step's list of attention work: which rows read which positions, in pieces that threads take one after the other.

    shared   rows of several sequences   x  their common leading blocks         first, for all of them
    own      rows of one chunk           x  the rest of its track, causally     going on from what the shared part gave

An item is some queries of some rows, one or all heads of keys, and the positions that they see; its blocks follow one
another in `tables`. See attention.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.attention.slots import IntArray
from ramify.kv.pool import KVPool
from ramify.native.library import Library
from ramify.plan import Chunk, SharedPrefix

# Not read again thanks to a group: fewer come from a cache faster than a part of their own would take.
FEWEST_SHARED_TOKENS = 4_096
MOST_PANELS = 6  # of queries in an item: together they stay in the second cache
ITEMS_PER_THREAD = 4  # to be had before items grow: threads end together
SCORES_PER_THREAD = 8_192  # fewer are computed before a second thread has woken up


class Item(NamedTuple):
    rows: int  # the first, in `order`
    query: int  # of those rows, as many for each as there are queries per head of keys
    queries: int
    head: int
    heads: int
    begin: int  # positions: row i sees begin … seen + i * growth - 1
    seen: int
    growth: int
    table: int  # where the block of position `begin` is named
    continues: int  # whether a shared item has been there before


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Numbers in int64, held as tensors: every layer asks for their addresses."""

    order: Tensor  # the rows of the chunks, then those of groups
    tables: Tensor
    items: Tensor  # (items, fields of Item), the shared ones first, in each part the longest first
    num_shared: int
    threads: int  # that are worth waking

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        rows: Sequence[int],
        shared: Sequence[SharedPrefix],
        *,
        block_size: int,
        kv_heads: int,
        group: int,
        panel: int,
        threads: int,
        fewest_shared_tokens: int = FEWEST_SHARED_TOKENS,
    ) -> AttentionWork:
        """rows: where each chunk begins; group: queries per head of keys; panel: queries multiplied at once."""
        order: list[int] = []
        tables: list[int] = []
        covered = [0] * len(chunks)  # blocks of each chunk that a group reads for it
        apart: list[Item] = []
        together: list[Item] = []
        for chunk, row in zip(chunks, rows, strict=True):
            count = len(chunk.token_ids)
            apart.append(Item(len(order), 0, count * group, 0, kv_heads, 0, chunk.start + 1, 1, 0, 0))
            order += range(row, row + count)
        for members in shared:
            seen, first = members.num_blocks * block_size, len(order)
            if (len(members.chunks) - 1) * seen < fewest_shared_tokens:
                continue
            for index in sorted(members.chunks):
                covered[index] = members.num_blocks
                order += range(rows[index], rows[index] + len(chunks[index].token_ids))
            queries = (len(order) - first) * group
            together.append(Item(first, 0, queries, 0, kv_heads, 0, seen, 0, len(tables), 0))
            tables += chunks[members.chunks[0]].block_table[: members.num_blocks]
        for index, chunk in enumerate(chunks):
            begin = covered[index] * block_size
            apart[index] = apart[index]._replace(begin=begin, table=len(tables), continues=int(begin > 0))
            tables += chunk.block_table[covered[index] :]
        parts = [_in_pieces(part, group, panel, ITEMS_PER_THREAD * threads) for part in (together, apart)]
        items = np.concatenate([_longest_first(part, group) for part in parts])
        num_scores = int(_num_scores(items, group).sum())
        return cls(
            torch.tensor(order),
            torch.tensor(tables),
            torch.from_numpy(items),
            num_shared=len(parts[0]),
            threads=min(threads, 1 + num_scores // SCORES_PER_THREAD),
        )


def most_queries(group: int, panel: int) -> int:
    """Of an item."""
    return max(MOST_PANELS * panel, group)


def _in_pieces(items: list[Item], group: int, panel: int, wanted: int) -> list[Item]:
    """Items of one head and some panels of queries; where there are rows enough, a single row is one piece."""
    if len(items) >= wanted and all(item.queries == group for item in items):
        return items
    panels = sum(-(-item.queries // panel) * item.heads for item in items)
    most = min(max(panels // wanted, 1) * panel, most_queries(group, panel))
    most = max(most, group)  # a row's queries stay together: whether it is alone must not decide how it is summed
    return [
        item._replace(query=query, queries=min(most, item.queries - query), head=head, heads=1)
        for item in items
        for query in range(0, item.queries, most)
        for head in range(item.heads)
    ]


def _num_scores(items: IntArray, group: int) -> IntArray:
    _, query, queries, _, heads, begin, seen, growth, _, _ = items.T
    scores: IntArray = queries * heads * (seen - begin + growth * (query + queries // 2) // group)
    return scores


def _longest_first(items: list[Item], group: int) -> IntArray:
    array = np.array(items, dtype=np.int64).reshape(len(items), len(Item._fields))
    return array[np.argsort(-_num_scores(array, group), kind="stable")]


class NativeAttention:
    """Of one model: keys and values lie in its pool before `attend` is called."""

    def __init__(
        self, library: Library, pool: KVPool, num_heads: int, fewest_shared_tokens: int = FEWEST_SHARED_TOKENS
    ) -> None:
        self._library = library
        self._pool = pool
        self._heads = num_heads
        self._kv_heads, self._head_dim = pool.kv.shape[-2:]
        self._fewest_shared_tokens = fewest_shared_tokens
        queries = most_queries(num_heads // self._kv_heads, library.tile_columns)
        self._scratch_size = library.attention_scratch(queries, num_heads, self._head_dim)  # of a thread
        self._scratch = torch.empty(0)
        self._scores = torch.empty(0)

    def work(self, chunks: Sequence[Chunk], rows: Sequence[int], shared: Sequence[SharedPrefix]) -> AttentionWork:
        """Once a step; see AttentionWork.of."""
        return AttentionWork.of(
            chunks,
            rows,
            shared,
            block_size=self._pool.block_size,
            kv_heads=self._kv_heads,
            group=self._heads // self._kv_heads,
            panel=self._library.tile_columns,
            threads=torch.get_num_threads(),
            fewest_shared_tokens=self._fewest_shared_tokens,
        )

    def attend(self, work: AttentionWork, layer: int, queries: Tensor, out: Tensor) -> None:
        """queries (T, heads or more, head_dim) dense, of which the first are read -> out (T, heads * head_dim).

        Of both, the rows that the work names.
        """
        if self._scratch.numel() < work.threads * self._scratch_size:
            self._scratch = torch.empty(work.threads * self._scratch_size)
        if self._scores.numel() < len(out) * self._heads:
            self._scores = torch.empty(len(out) * self._heads)
        self._library.attend(
            queries.data_ptr(),
            queries.stride(0),
            self._pool.layers[layer].data_ptr(),
            out.data_ptr(),
            self._scores.data_ptr(),
            work.order.data_ptr(),
            work.tables.data_ptr(),
            work.items.data_ptr(),
            work.num_shared,
            len(work.items),
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._pool.block_size,
            self._scratch.data_ptr(),
            self._scratch_size,
            work.threads,
        )
