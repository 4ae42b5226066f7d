"""A step's reads as a list of work, cut into items that threads take one after the other.

    shared   rows of several chunks   x  their common leading blocks         first, for all of them
    own      rows of one chunk        x  the rest of its track, causally     continuing what the shared part began

An item is some queries of some rows, one or all KV heads, and the positions that they see; its blocks follow one
another in `tables`. See attention.cpp.

A row by itself is read in another way than many, and what is shared is summed before what is not, so how a row is
summed depends on what is computed with it. `alike`, for batch invariance: every row is read as many are, from its
position 0 on; queries beside it, and keys that only they see, leave its sums as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.cpu.library import Library, floats
from ramify.cpu.structures import PassFields
from ramify.device.pool import KVPool
from ramify.device.reads import Int64s, Reads, SharingRule

# Fewer positions are read from the processor's cache faster than a separate pass over them would take.
SHARING = SharingRule(fewest_positions=4_096)
NO_SHARING = SharingRule(fewest_positions=2**62)
MOST_PANELS = 6  # of queries in an item: so many stay in the second cache together
ITEMS_PER_THREAD = 4  # at least, before items grow: so threads end at about the same time
SCORES_PER_THREAD = 8_192  # with fewer, one thread is done before a second has woken up


class Item(NamedTuple):
    rows: int  # the first, in `order`
    query: int  # the first, of those rows' queries for one KV head: each row has queries_per_head of them
    queries: int
    head: int  # the first KV head
    heads: int
    begin: int  # positions: row i sees begin … end + i * growth - 1
    end: int
    growth: int
    table: int  # index in `tables` of the block that holds position `begin`
    continues: int  # whether a shared item of the same queries comes before


@dataclass(frozen=True, slots=True)
class AttentionItems:
    """int64 numbers, held as tensors because every layer needs their addresses."""

    order: Tensor  # the rows of the chunks, then those of sharers
    tables: Tensor
    items: Tensor  # (items, fields of Item), the shared ones first, in each part the longest first
    num_shared: int
    threads: int  # as many as are worth waking

    @classmethod
    def of(
        cls, reads: Reads, *, kv_heads: int, queries_per_head: int, panel: int, threads: int, alike: bool = False
    ) -> AttentionItems:
        """queries_per_head: query heads per KV head; panel: queries multiplied at once."""
        assert not (alike and reads.shared), "what is shared is summed apart"
        order: list[int] = []
        tables: list[int] = []
        own: list[Item] = []
        shared: list[Item] = []
        chunks = list(zip(reads.first_rows.tolist(), reads.num_rows.tolist(), strict=True))
        firsts = [0, *accumulate(count for _, count in chunks)]
        for row, count in chunks:
            order += range(row, row + count)
        for prefix in reads.shared:
            end, first = prefix.num_blocks * reads.block_size, len(order)
            for row, count in (chunks[sharer] for sharer in sorted(prefix.sharers)):
                order += range(row, row + count)
            queries = (len(order) - first) * queries_per_head
            shared.append(Item(first, 0, queries, 0, kv_heads, 0, end, 0, len(tables), 0))
            tables += reads.tables[prefix.sharers[0]][: prefix.num_blocks]
        for (_, count), first, begin, end, table in zip(
            chunks, firsts, reads.begins.tolist(), reads.ends.tolist(), reads.tables, strict=False
        ):
            queries = count * queries_per_head
            own.append(Item(first, 0, queries, 0, kv_heads, begin, end, 1, len(tables), int(begin > 0)))
            tables += table[begin // reads.block_size :]
        parts = [_in_pieces(part, queries_per_head, panel, ITEMS_PER_THREAD * threads) for part in (shared, own)]
        if alike:
            parts[1] = [_not_single(item, queries_per_head) for item in parts[1]]
        items = np.concatenate([_longest_first(part, queries_per_head) for part in parts])
        num_scores = int(_num_scores(items, queries_per_head).sum())
        return cls(
            torch.from_numpy(np.array(order, np.int64)),
            torch.from_numpy(np.array(tables, np.int64)),
            torch.from_numpy(items),
            num_shared=len(parts[0]),
            threads=min(threads, 1 + num_scores // SCORES_PER_THREAD),
        )


def most_queries(queries_per_head: int, panel: int) -> int:
    """The most queries that an item may have."""
    return max(MOST_PANELS * panel, queries_per_head)


def _in_pieces(items: list[Item], queries_per_head: int, panel: int, wanted: int) -> list[Item]:
    """Items of one KV head and some panels of queries; where single rows keep all threads busy, a row each."""
    if len(items) >= wanted and all(item.queries == queries_per_head for item in items):
        return items
    panels = sum(-(-item.queries // panel) * item.heads for item in items)
    most = min(max(panels // wanted, 1) * panel, most_queries(queries_per_head, panel))
    # A row's queries stay together: how a row is summed must not depend on whether it is alone.
    most = max(most, queries_per_head)
    return [
        item._replace(query=query, queries=min(most, item.queries - query), head=head, heads=1)
        for item in items
        for query in range(0, item.queries, most)
        for head in range(item.heads)
    ]


def _not_single(item: Item, queries_per_head: int) -> Item:
    """The kernel takes one whole row whose end may grow for a decode. The first row of an item sees up to `end`."""
    is_one_row = item.query == 0 and item.queries == queries_per_head
    return item._replace(growth=0) if is_one_row else item


def _num_scores(items: Int64s, queries_per_head: int) -> Int64s:
    _, query, queries, _, heads, begin, end, growth, _, _ = items.T
    scores: Int64s = queries * heads * (end - begin + growth * (query + queries // 2) // queries_per_head)
    return scores


def _longest_first(items: list[Item], queries_per_head: int) -> Int64s:
    array = np.array(items, dtype=np.int64).reshape(len(items), len(Item._fields))
    return array[np.argsort(-_num_scores(array, queries_per_head), kind="stable")]


class CpuAttention:
    """One model's attention: keys and values are in its pool before `attend` is called."""

    def __init__(self, library: Library, pool: KVPool, num_heads: int, *, alike: bool = False) -> None:
        self._library = library
        self._alike = alike
        self._pool = pool
        self._heads = num_heads
        self._kv_heads, self._head_dim = pool.kv.shape[-2:]
        self._queries_per_head = num_heads // self._kv_heads
        queries = most_queries(self._queries_per_head, library.tile_columns)
        self._scratch_size = library.attention_scratch(queries, num_heads, self._head_dim)  # of a thread
        self._scratch = self._scores = floats(0)

    def items(self, reads: Reads) -> AttentionItems:
        return AttentionItems.of(
            reads,
            kv_heads=self._kv_heads,
            queries_per_head=self._queries_per_head,
            panel=self._library.tile_columns,
            threads=self._library.threads,
            alike=self._alike,
        )

    def put(self, step: PassFields, work: AttentionItems, out: Tensor) -> None:
        """What `attend` needs beside queries; out (T, heads * head_dim). Only rows that the items name are written."""
        if self._scratch.numel() < work.threads * self._scratch_size:
            self._scratch = floats(work.threads * self._scratch_size)
        if self._scores.numel() < out.shape[0] * self._heads:
            self._scores = floats(out.shape[0] * self._heads)
        step.order, step.tables = work.order.data_ptr(), work.tables.data_ptr()
        step.items, step.num_shared, step.num_items = work.items.data_ptr(), work.num_shared, work.items.shape[0]
        step.scores, step.scratch, step.scratch_size = (
            self._scores.data_ptr(),
            self._scratch.data_ptr(),
            self._scratch_size,
        )
        step.attention_threads = work.threads

    def attend(self, work: AttentionItems, layer: int, queries: Tensor, out: Tensor) -> None:
        """By itself: queries (T, heads or more, head_dim) dense -> out (T, heads * head_dim)."""
        step = PassFields()
        self.put(step, work, out)
        self._library.attend(
            queries.data_ptr(),
            queries.stride(0),
            self._pool.layers[layer].data_ptr(),
            out.data_ptr(),
            step.scores,
            step.order,
            step.tables,
            step.items,
            step.num_shared,
            step.num_items,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._pool.block_size,
            step.scratch,
            step.scratch_size,
            step.attention_threads,
        )
