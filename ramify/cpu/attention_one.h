// One row over its positions. Bound by the reading of keys and values, which are used once and as they lie.
#pragma once

#include <cstring>
#include <initializer_list>

#include "attention.h"

constexpr long AHEAD = 32;  // keys that are asked for before they are needed

// What some queries have seen so far: the largest score, the sum of 2^(score - largest), and the weighted values.
struct Seen {
    float *largest, *total, *values;
    long stride;  // of values
};

inline void begin(const Step& step, bool continues, const float* out, const float* score, Seen seen, long query) {
    float* values = seen.values + query * seen.stride;
    std::memset(values, 0, seen.stride * sizeof(float));
    seen.largest[query] = continues ? *score : NOTHING;
    seen.total[query] = continues ? 1.0f : 0.0f;
    if (continues) std::memcpy(values, out, step.head_dim * sizeof(float));
}

inline void end(const Step& step, Seen seen, long query, float* out, float* score) {
    const float *values = seen.values + query * seen.stride, share = 1.0f / seen.total[query];
    for (long j = 0; j < step.head_dim; ++j) out[j] = values[j] * share;
    *score = seen.largest[query] + std::log2(seen.total[query]);
}

// Scores of one query become weights 2^(score - largest); what was seen before is scaled to the new largest.
inline void weigh(float* scores, long count, Seen seen, long query) {
    for (long j = count; j < KEYS; ++j) scores[j] = NOTHING;
    Vector most = load(scores);
    for (long j = WIDTH; j < KEYS; j += WIDTH) {
        const Vector other = load(scores + j);
        most = other > most ? other : most;
    }
    const float before = seen.largest[query];
    float now = largest(most);
    now = now > before ? now : before;
    const float base = now == NOTHING ? 0.0f : now;
    Vector totals{};
    for (long j = 0; j < KEYS; j += WIDTH) {
        const Vector weight = power_of_two(load(scores + j) - base);
        store(scores + j, weight);
        totals += weight;
    }
    const float kept = now == before ? 1.0f : power_of_two(all(before - base))[0];
    seen.largest[query] = now;
    seen.total[query] = seen.total[query] * kept + sum(totals);
    if (kept != 1.0f)
        for (long j = 0; j < seen.stride; j += WIDTH)
            store(seen.values + query * seen.stride + j, load(seen.values + query * seen.stride + j) * kept);
}

// Scores of the queries of one head of keys with `count` keys, up to as many as a vector has lanes.
template <long PARTS>
void score(const float* queries, long group, const float* const* slots, long offset, long count, float* scores) {
    const float* keys[WIDTH];
    for (long j = 0; j < WIDTH; ++j) keys[j] = slots[j < count ? j : 0] + offset;
    for (long query = 0; query < group; ++query, queries += PARTS * WIDTH, scores += KEYS) {
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

// Keys and values that will be needed soon come into the second cache while others are multiplied.
// Inlined by force: GCC takes a function that only prefetches for one that does nothing, and drops its calls.
__attribute__((always_inline)) inline void ask_for(const Step& step, const Item& item, const float* const* slots,
                                                   long count) {
    const long offset = item.head * step.head_dim, wide = item.heads * step.head_dim;
    for (long j = 0; j < count; ++j)
        for (const float* part : {slots[j] + offset, slots[j] + step.kv_heads * step.head_dim + offset})
            for (long k = 0; k < wide; k += 16) __builtin_prefetch(part + k, 0, 2);
}

// A head is PARTS vectors.
template <long PARTS>
void attend_one(const Step& step, const Item& item, float* scratch) {
    constexpr long head_dim = PARTS * WIDTH;
    const long group = step.group(), slot = step.slot();
    const long row = step.order[item.rows], to_values = step.kv_heads * head_dim;
    const long first = item.head * group, queries = item.heads * group;
    const long offset = item.head * head_dim;
    float* q = scratch;
    Seen seen{q + queries * head_dim, q + queries * (head_dim + 1), q + queries * (head_dim + 2), head_dim};
    float* scores = seen.values + queries * head_dim;  // (queries, KEYS)
    const float* from = step.queries + row * step.query_stride + first * head_dim;
    float* out = step.out + (row * step.heads + first) * head_dim;
    float* out_scores = step.scores + row * step.heads + first;
    for (long j = 0; j < queries * head_dim; ++j) q[j] = from[j] * step.scale;
    for (long query = 0; query < queries; ++query)
        begin(step, item.continues, out + query * head_dim, out_scores + query, seen, query);

    for (long position = item.from; position < item.seen; position += KEYS) {
        const long left = item.seen - position, count = left < KEYS ? left : KEYS;
        const long known = left < KEYS + AHEAD ? left : KEYS + AHEAD;
        const float* slots[KEYS + AHEAD];
        step.find(item, position - item.from, known, slots);
        for (long j = 0; j < count; j += WIDTH)
            for (long head = 0; head < item.heads; ++head) {
                const long keys = offset + head * head_dim, here = count - j < WIDTH ? count - j : WIDTH;
                const long next = j + AHEAD + head * WIDTH / item.heads,
                           end = j + AHEAD + (head + 1) * WIDTH / item.heads;
                ask_for(step, item, slots + next, (end < known ? end : known) - next);
                score<PARTS>(q + head * group * head_dim, group, slots + j, keys, here,
                             scores + head * group * KEYS + j);
            }
        for (long query = 0; query < queries; ++query) weigh(scores + query * KEYS, count, seen, query);
        step.by_block(item, position, count, [&](long j, long together) {
            for (long head = 0; head < item.heads; ++head) {
                const Left weights{scores + head * group * KEYS + j, KEYS, 1};
                const float* values = slots[j] + to_values + offset + head * head_dim;
                for (long k = 0; k < head_dim; k += TILE_COLUMNS)
                    multiply<TILE_VECTORS>(group, together, weights, values + k, slot,
                                           seen.values + head * group * head_dim + k, head_dim, true);
            }
        });
    }
    for (long query = 0; query < queries; ++query) end(step, seen, query, out + query * head_dim, out_scores + query);
}
