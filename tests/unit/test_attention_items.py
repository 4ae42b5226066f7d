"""The CPU's list of attention work: every query sees every position of its own exactly once, whatever the pieces."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ramify.cpu.attention_items import AttentionItems, Item, most_queries
from ramify.device.reads import SharingRule
from ramify.engine.plan import Chunk, SharedPrefix
from ramify.engine.sharing import best_sharing
from tests.attention_truth import reads_of

BLOCK = 4


@st.composite
def steps(draw: st.DrawFn) -> list[Chunk]:
    """Chunks whose tables begin alike in families; every block's number is its own."""
    chunks, free = [], 0
    for _ in range(draw(st.integers(1, 4))):
        common = list(range(free, free + draw(st.integers(0, 5))))
        free += len(common)
        for _ in range(draw(st.integers(1, 5))):
            past = len(common) * BLOCK + draw(st.integers(0, 9))
            count = draw(st.sampled_from([1, 1, 2, 7, 30]))
            own = -(-(past + count) // BLOCK) - len(common)
            chunks.append(Chunk([0] * count, past, (*common, *range(free, free + own))))
            free += own
    return chunks


@given(
    chunks=steps(),
    kv_heads=st.integers(1, 3),
    queries_per_head=st.integers(1, 4),
    panel=st.sampled_from([1, 4, 16]),
    threads=st.integers(1, 4),
    fewest=st.sampled_from([0, 8, 10**9]),
)
def test_every_query_sees_its_positions_once(
    chunks: list[Chunk], *, kv_heads: int, queries_per_head: int, panel: int, threads: int, fewest: int
) -> None:
    starts, total = [], 0
    for chunk in chunks:
        starts.append(total)
        total += len(chunk.token_ids)
    tables = [chunk.block_table[: chunk.start // BLOCK] for chunk in chunks]
    shared = [SharedPrefix(prefix.num_blocks, prefix.rows) for prefix in best_sharing(tables)]
    reads = reads_of(chunks, shared, BLOCK, SharingRule(fewest_positions=fewest))
    work = AttentionItems.of(reads, kv_heads=kv_heads, queries_per_head=queries_per_head, panel=panel, threads=threads)
    seen: Counter[tuple[int, int, int]] = Counter()  # row, query head, slot
    begun = set()
    for index, fields in enumerate(work.items.tolist()):
        item = Item(*fields)
        assert item.queries <= most_queries(queries_per_head, panel)
        assert (index < work.num_shared) == (item.growth == 0)
        for query in range(item.query, item.query + item.queries):
            row = int(work.order[item.rows + query // queries_per_head])
            for head in range(item.head, item.head + item.heads):
                row_and_head = (row, head * queries_per_head + query % queries_per_head)
                assert (row_and_head in begun) == bool(item.continues)
                for position in range(item.begin, item.end + query // queries_per_head * item.growth):
                    block, inside = divmod(position - item.begin, BLOCK)
                    seen[*row_and_head, int(work.tables[item.table + block]) * BLOCK + inside] += 1
        if index < work.num_shared:
            begun |= {
                (
                    int(work.order[item.rows + query // queries_per_head]),
                    head * queries_per_head + query % queries_per_head,
                )
                for query in range(item.query, item.query + item.queries)
                for head in range(item.head, item.head + item.heads)
            }
    expected = Counter(
        (start + offset, head, chunk.block_table[position // BLOCK] * BLOCK + position % BLOCK)
        for chunk, start in zip(chunks, starts, strict=True)
        for offset in range(len(chunk.token_ids))
        for head in range(kv_heads * queries_per_head)
        for position in range(chunk.start + offset + 1)
    )
    assert seen == expected


def test_threads_are_woken_for_work_worth_it() -> None:
    def work(rows: int, positions: int) -> AttentionItems:
        chunks = [Chunk([0], positions, tuple(range(positions // 16 + 1))) for _ in range(rows)]
        return AttentionItems.of(reads_of(chunks, [], 16), kv_heads=3, queries_per_head=3, panel=64, threads=8)

    assert work(1, 64).threads == 1
    assert work(64, 1000).threads == 8
    assert len(work(64, 1000).items) == 64  # a row each
    assert len(work(2, 1000).items) == 6  # by head: else threads would have nothing to do
