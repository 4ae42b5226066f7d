// What both ways of attending share: the data of one call, and the items of its list of work (cpu/attention_items.py).
#pragma once

#include <cmath>

#include "vectors.h"

constexpr long KEYS = 64;  // at a time: their scores, and keys and values of one head, stay in the first caches
constexpr float MINUS_INFINITY = -INFINITY;  // the score of a masked key, and the largest score over no keys

struct Item {                    // as cpu/attention_items.py writes them
    int64_t rows;                // order[rows], order[rows + 1], …
    int64_t query, queries;      // of those rows, for one KV head: row by row, each with queries_per_head queries
    int64_t head, heads;         // KV heads
    int64_t begin, end, growth;  // row i sees the positions begin … end + i * growth - 1
    int64_t table;               // tables[table]: the block that holds position `begin`
    int64_t continues;           // whether a shared item came before: `out` and `scores` hold what it gave
};

struct AttentionData {
    const float* queries;
    const float* pool;
    float *out, *scores;
    const int64_t *order, *tables;
    long query_stride, heads, kv_heads, head_dim, block_size;
    float scale;

    long queries_per_head() const { return heads / kv_heads; }  // query heads per KV head
    long slot_size() const { return 2 * kv_heads * head_dim; }

    // The addresses of the slots of `count` positions, from item.begin + offset on.
    void find_slots(const Item& item, long offset, long count, const float** slots) const {
        const int64_t* block = tables + item.table + offset / block_size;
        for (long j = 0, inside = offset % block_size; j < count; ++block, inside = 0) {
            const float* slot = pool + (*block * block_size + inside) * slot_size();
            for (; inside < block_size && j < count; ++inside, ++j, slot += slot_size()) slots[j] = slot;
        }
    }

    // Cuts `count` positions, from `position` on, where a block ends. Calls act(first, length) for each piece, `first`
    // counted from `position`: inside a block, slots are evenly apart.
    template <class Act>
    void for_each_block(const Item& item, long position, long count, Act act) const {
        for (long first = 0; first < count;) {
            const long rest_of_block = block_size - (position - item.begin + first) % block_size;
            const long length = rest_of_block < count - first ? rest_of_block : count - first;
            act(first, length);
            first += length;
        }
    }
};

// queries (rows, heads, head_dim) `query_stride` apart, pool (slots, 2, kv_heads, head_dim) -> out (rows, heads,
// head_dim) and scores (rows, heads), the log2 of the sum of 2^score. Items [0, num_shared) are done before all others.
extern "C" void attend(const float* queries, long query_stride, const float* pool, float* out, float* scores,
                       const int64_t* order, const int64_t* tables, const int64_t* items, long num_shared,
                       long num_items, long heads, long kv_heads, long head_dim, long block_size, float* scratch,
                       long scratch_size, long threads);
