// What the ways of attending have in common: a step's data, and items of its list of work (cpu/attention_items.py).
#pragma once

#include <cmath>

#include "vectors.h"

constexpr long KEYS = 64;  // at a time: their scores, and keys and values of one head, stay in the first caches
constexpr float NOTHING = -INFINITY;

struct Item {                // as cpu/attention_items.py writes them
    int64_t rows;            // order[rows], order[rows + 1], …
    int64_t query, queries;  // of those rows and one head of keys: row by row, as many as there are per head of keys
    int64_t head, heads;     // heads of keys
    int64_t from, seen, growth;  // row i sees the positions from … seen + i * growth - 1
    int64_t table;               // tables[table]: the block that holds position `from`
    int64_t continues;           // whether these queries have seen something already: it is in out and scores
};

struct Step {
    const float* queries;
    const float* pool;
    float *out, *scores;
    const int64_t *order, *tables;
    long query_stride, heads, kv_heads, head_dim, block_size;
    float scale;

    long group() const { return heads / kv_heads; }  // queries' heads per head of keys
    long slot() const { return 2 * kv_heads * head_dim; }

    // Where the slots of `count` positions begin; the first is `place` positions behind the item's first.
    void find(const Item& item, long place, long count, const float** slots) const {
        const int64_t* block = tables + item.table + place / block_size;
        for (long j = 0, inside = place % block_size; j < count; ++block, inside = 0) {
            const float* slot_of = pool + (*block * block_size + inside) * slot();
            for (; inside < block_size && j < count; ++inside, ++j, slot_of += slot()) slots[j] = slot_of;
        }
    }

    // Calls act(j, together) for pieces of positions, position + 1, … that lie in one block, evenly apart.
    template <class Act>
    void by_block(const Item& item, long position, long count, Act act) const {
        for (long j = 0; j < count;) {
            const long inside = block_size - (position - item.from + j) % block_size;
            const long together = inside < count - j ? inside : count - j;
            act(j, together);
            j += together;
        }
    }
};
