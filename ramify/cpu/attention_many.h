// Many queries over the same positions: chunks of prompts, and the sharers of a prefix. Bound by arithmetic.
#pragma once

#include <cstring>

#include "attention.h"

// Online softmax by columns: scores (count, COLUMNS) become weights 2^(score - largest of the column), and what earlier
// keys gave (totals and values) is scaled to the new largest.
template <long COLUMNS>
inline void softmax_columns(float* scores, long count, float* largest, float* totals, float* values, long head_dim) {
    for (long column = 0; column < COLUMNS; column += WIDTH) {
        const Vector before = load(largest + column);
        Vector now = before;
        for (long j = 0; j < count; ++j) {
            const Vector score = load(scores + j * COLUMNS + column);
            now = score > now ? score : now;
        }
        const Vector base = now == MINUS_INFINITY ? Vector{} : now;
        Vector total{};
        for (long j = 0; j < count; ++j) {
            const Vector weight = power_of_two(load(scores + j * COLUMNS + column) - base);
            store(scores + j * COLUMNS + column, weight);
            total += weight;
        }
        const Vector rescale = power_of_two(before - base);
        store(largest + column, now);
        store(totals + column, load(totals + column) * rescale + total);
        for (long k = 0; k < head_dim; ++k) {
            float* value = values + k * COLUMNS + column;
            store(value, load(value) * rescale);
        }
    }
}

// Masks one vector of columns of scores (count, COLUMNS): column i sees only the first num_visible(i) keys.
template <long COLUMNS, class NumVisible>
inline void mask(float* scores, long count, NumVisible num_visible) {
    Integers visible{};
    for (long i = 0; i < WIDTH; ++i) visible[i] = static_cast<int32_t>(num_visible(i));
    for (long j = 0; j < count; ++j) {
        float* score = scores + j * COLUMNS;
        store(score, visible > static_cast<int32_t>(j) ? load(score) : broadcast(MINUS_INFINITY));
    }
}

// One vector of rows, scaled, becomes columns of `to` (head_dim, COLUMNS); a null row becomes zeros.
template <long COLUMNS>
void to_columns(const float* const* rows, long head_dim, float scale, float* to) {
    long k = 0;
    for (; k + WIDTH <= head_dim; k += WIDTH) {
        Vector square[WIDTH];
        for (long i = 0; i < WIDTH; ++i) square[i] = rows[i] ? load(rows[i] + k) * scale : Vector{};
        transpose(square);
        for (long i = 0; i < WIDTH; ++i) store(to + (k + i) * COLUMNS, square[i]);
    }
    for (; k < head_dim; ++k)
        for (long i = 0; i < WIDTH; ++i) to[k * COLUMNS + i] = rows[i] ? rows[i][k] * scale : 0.0f;
}

// And back, each column times a scale of its own; null rows are not written.
template <long COLUMNS>
void to_rows(const float* columns, long head_dim, Vector scales, float* const* rows) {
    long k = 0;
    for (; k + WIDTH <= head_dim; k += WIDTH) {
        Vector square[WIDTH];
        for (long i = 0; i < WIDTH; ++i) square[i] = load(columns + (k + i) * COLUMNS) * scales;
        transpose(square);
        for (long i = 0; i < WIDTH; ++i)
            if (rows[i]) store(rows[i] + k, square[i]);
    }
    for (; k < head_dim; ++k)
        for (long i = 0; i < WIDTH; ++i)
            if (rows[i]) rows[i][k] = columns[k * COLUMNS + i] * scales[i];
}

// Many queries over the same positions, COLUMNS of them at a time. Queries and values are transposed, a query being a
// column. Keys are then the left side of a product and are read where they lie, and the maximum over keys is taken
// between vectors, never inside one.
template <int VECTORS>
void attend_many(const AttentionData& data, const Item& item, long head, float* scratch) {
    constexpr long COLUMNS = VECTORS * WIDTH;
    const long queries_per_head = data.queries_per_head(), head_dim = data.head_dim, queries = item.queries;
    const long panels = (queries + COLUMNS - 1) / COLUMNS, columns = panels * COLUMNS;
    const long head_offset = head * head_dim;         // in a slot's keys, and in its values
    float* transposed = scratch;                      // queries, by panel (head_dim, COLUMNS)
    float* values = transposed + columns * head_dim;  // weighted sums, the same
    float* largest = values + columns * head_dim;     // (columns)
    float* totals = largest + columns;                // the same
    float* scores = totals + columns;                 // (KEYS, COLUMNS)
    float* gathered = scores + KEYS * COLUMNS;        // values of keys (KEYS, head_dim)

    const auto row_of = [&](long query) { return data.order[item.rows + (item.query + query) / queries_per_head]; };
    const auto head_of = [&](long query) { return head * queries_per_head + (item.query + query) % queries_per_head; };
    const auto index_of = [&](long query) { return row_of(query) * data.heads + head_of(query); };  // in out and scores
    const auto end_of = [&](long query) { return item.end + (item.query + query) / queries_per_head * item.growth; };

    for (long query = 0; query < columns; query += WIDTH) {
        const float *from[WIDTH], *earlier[WIDTH];
        for (long i = 0; i < WIDTH; ++i) {
            const bool exists = query + i < queries, continues = exists && item.continues;
            from[i] = nullptr;
            if (exists) from[i] = data.queries + row_of(query + i) * data.query_stride + head_of(query + i) * head_dim;
            earlier[i] = continues ? data.out + index_of(query + i) * head_dim : nullptr;
            largest[query + i] = continues ? data.scores[index_of(query + i)] : MINUS_INFINITY;
            totals[query + i] = continues ? 1.0f : 0.0f;
        }
        const long offset = query / COLUMNS * head_dim * COLUMNS + query % COLUMNS;
        to_columns<COLUMNS>(from, head_dim, data.scale, transposed + offset);
        to_columns<COLUMNS>(earlier, head_dim, 1.0f, values + offset);
    }
    const long last = end_of(queries - 1);
    for (long position = item.begin; position < last; position += KEYS) {
        const long count = last - position < KEYS ? last - position : KEYS;
        const float* slots[KEYS];
        data.find_slots(item, position - item.begin, count, slots);
        for (long j = 0; j < count; ++j)
            std::memcpy(gathered + j * head_dim, slots[j] + data.kv_heads * head_dim + head_offset,
                        head_dim * sizeof(float));
        for (long first = 0; first < columns; first += COLUMNS) {
            const long end = first + COLUMNS < queries ? first + COLUMNS : queries;
            // Rows come in order of position: what the last query of a panel does not see, none of them sees.
            const long visible = end_of(end - 1) - position < count ? end_of(end - 1) - position : count;
            if (visible <= 0) continue;
            data.for_each_block(item, position, visible, [&](long j, long length) {
                multiply<VECTORS>(length, head_dim, {slots[j] + head_offset, data.slot_size(), 1},
                                  transposed + first * head_dim, COLUMNS, scores + j * COLUMNS, COLUMNS, false);
            });
            for (long query = first; query < end && end_of(query) < position + visible; query += WIDTH)
                mask<COLUMNS>(scores + query - first, visible, [&](long i) { return end_of(query + i) - position; });
            float* panel = values + first * head_dim;
            softmax_columns<COLUMNS>(scores, visible, largest + first, totals + first, panel, head_dim);
            multiply<VECTORS>(head_dim, visible, {gathered, 1, head_dim}, scores, COLUMNS, panel, COLUMNS, true);
        }
    }
    for (long query = 0; query < queries; query += WIDTH) {
        float* out[WIDTH];
        for (long i = 0; i < WIDTH; ++i) {
            const bool exists = query + i < queries;
            out[i] = exists ? data.out + index_of(query + i) * head_dim : nullptr;
            if (exists) data.scores[index_of(query + i)] = largest[query + i] + std::log2(totals[query + i]);
        }
        const long offset = query / COLUMNS * head_dim * COLUMNS + query % COLUMNS;
        to_rows<COLUMNS>(values + offset, head_dim, 1.0f / load(totals + query), out);
    }
}
