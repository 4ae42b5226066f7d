// One row over its positions. Bound by memory: every key and value is used once, so they are read where they lie.
#pragma once

#include <cstring>
#include <initializer_list>

#include "attention.h"

constexpr long AHEAD = 32;  // keys between the one that is multiplied and the one that is prefetched

// The online softmax of some queries: the largest score so far, the sum of 2^(score - largest), the weighted values.
struct Softmax {
    float *largest, *total, *values;
    long stride;  // of values
};

inline void begin(const AttentionData& data, bool continues, const float* out, const float* score, Softmax softmax,
                  long query) {
    float* values = softmax.values + query * softmax.stride;
    std::memset(values, 0, softmax.stride * sizeof(float));
    softmax.largest[query] = continues ? *score : MINUS_INFINITY;
    softmax.total[query] = continues ? 1.0f : 0.0f;
    if (continues) std::memcpy(values, out, data.head_dim * sizeof(float));
}

inline void finish(const AttentionData& data, Softmax softmax, long query, float* out, float* score) {
    const float *values = softmax.values + query * softmax.stride, share = 1.0f / softmax.total[query];
    for (long j = 0; j < data.head_dim; ++j) out[j] = values[j] * share;
    *score = softmax.largest[query] + std::log2(softmax.total[query]);
}

// Scores of one query become weights 2^(score - largest); what earlier keys gave is scaled to the new largest.
inline void add_scores(float* scores, long count, Softmax softmax, long query) {
    for (long j = count; j < KEYS; ++j) scores[j] = MINUS_INFINITY;
    Vector most = load(scores);
    for (long j = WIDTH; j < KEYS; j += WIDTH) {
        const Vector other = load(scores + j);
        most = other > most ? other : most;
    }
    const float before = softmax.largest[query];
    float now = largest(most);
    now = now > before ? now : before;
    const float base = now == MINUS_INFINITY ? 0.0f : now;
    Vector totals{};
    for (long j = 0; j < KEYS; j += WIDTH) {
        const Vector weight = power_of_two(load(scores + j) - base);
        store(scores + j, weight);
        totals += weight;
    }
    const float rescale = now == before ? 1.0f : power_of_two(broadcast(before - base))[0];
    softmax.largest[query] = now;
    softmax.total[query] = softmax.total[query] * rescale + sum(totals);
    if (rescale != 1.0f)
        for (long j = 0; j < softmax.stride; j += WIDTH)
            store(softmax.values + query * softmax.stride + j,
                  load(softmax.values + query * softmax.stride + j) * rescale);
}

// Scores of one KV head's queries with `count` keys, of which there are at most as many as a vector has lanes.
template <long PARTS>
void score(const float* queries, long queries_per_head, const float* const* slots, long offset, long count,
           float* scores) {
    const float* keys[WIDTH];
    for (long j = 0; j < WIDTH; ++j) keys[j] = slots[j < count ? j : 0] + offset;
    for (long query = 0; query < queries_per_head; ++query, queries += PARTS * WIDTH, scores += KEYS) {
        Vector products[WIDTH];
#pragma GCC unroll 16
        for (long j = 0; j < WIDTH; ++j) products[j] = load(keys[j]) * load(queries);
#pragma GCC unroll 16
        for (long part = 1; part < PARTS; ++part)
#pragma GCC unroll 16
            for (long j = 0; j < WIDTH; ++j) products[j] += load(keys[j] + part * WIDTH) * load(queries + part * WIDTH);
        store(scores, sums(products));
    }
}

// Brings keys and values that are needed soon into the second cache, while others are multiplied.
// Always inlined: GCC takes a function that only prefetches for one that does nothing, and drops its calls.
__attribute__((always_inline)) inline void prefetch(const AttentionData& data, const Item& item,
                                                    const float* const* slots, long count) {
    const long offset = item.head * data.head_dim, wide = item.heads * data.head_dim;
    for (long j = 0; j < count; ++j)
        for (const float* part : {slots[j] + offset, slots[j] + data.kv_heads * data.head_dim + offset})
            for (long k = 0; k < wide; k += 16) __builtin_prefetch(part + k, 0, 2);
}

// A head is PARTS vectors long.
template <long PARTS>
void attend_one(const AttentionData& data, const Item& item, float* scratch) {
    constexpr long head_dim = PARTS * WIDTH;
    const long queries_per_head = data.queries_per_head(), slot_size = data.slot_size();
    const long row = data.order[item.rows], to_values = data.kv_heads * head_dim;
    const long first = item.head * queries_per_head, queries = item.heads * queries_per_head;
    const long head_offset = item.head * head_dim;
    float* q = scratch;
    Softmax softmax{q + queries * head_dim, q + queries * (head_dim + 1), q + queries * (head_dim + 2), head_dim};
    float* scores = softmax.values + queries * head_dim;  // (queries, KEYS)
    const float* from = data.queries + row * data.query_stride + first * head_dim;
    float* out = data.out + (row * data.heads + first) * head_dim;
    float* out_scores = data.scores + row * data.heads + first;
    for (long j = 0; j < queries * head_dim; ++j) q[j] = from[j] * data.scale;
    for (long query = 0; query < queries; ++query)
        begin(data, item.continues, out + query * head_dim, out_scores + query, softmax, query);

    for (long position = item.begin; position < item.end; position += KEYS) {
        const long left = item.end - position, count = left < KEYS ? left : KEYS;
        const long known = left < KEYS + AHEAD ? left : KEYS + AHEAD;
        const float* slots[KEYS + AHEAD];
        data.find_slots(item, position - item.begin, known, slots);
        for (long j = 0; j < count; j += WIDTH)
            for (long head = 0; head < item.heads; ++head) {
                const long keys = head_offset + head * head_dim, here = count - j < WIDTH ? count - j : WIDTH;
                const long next = j + AHEAD + head * WIDTH / item.heads,
                           end = j + AHEAD + (head + 1) * WIDTH / item.heads;
                prefetch(data, item, slots + next, (end < known ? end : known) - next);
                score<PARTS>(q + head * queries_per_head * head_dim, queries_per_head, slots + j, keys, here,
                             scores + head * queries_per_head * KEYS + j);
            }
        for (long query = 0; query < queries; ++query) add_scores(scores + query * KEYS, count, softmax, query);
        data.for_each_block(item, position, count, [&](long j, long length) {
            for (long head = 0; head < item.heads; ++head) {
                const Left weights{scores + head * queries_per_head * KEYS + j, KEYS, 1};
                const float* values = slots[j] + to_values + head_offset + head * head_dim;
                for (long k = 0; k < head_dim; k += TILE_COLUMNS)
                    multiply<TILE_VECTORS>(queries_per_head, length, weights, values + k, slot_size,
                                           softmax.values + head * queries_per_head * head_dim + k, head_dim, true);
            }
        });
    }
    for (long query = 0; query < queries; ++query)
        finish(data, softmax, query, out + query * head_dim, out_scores + query);
}
