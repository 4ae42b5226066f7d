// Many queries over the same positions: prompts, and groups over what they share. Bound by arithmetic.
#pragma once

#include <cstring>

#include "attention.h"

// Scores (count, COLUMNS) become weights 2^(score - largest of its column); what the columns have seen before is
// scaled to the new largest.
template <long COLUMNS>
inline void weigh_columns(float* scores, long count, float* most, float* totals, float* values, long head_dim) {
    for (long column = 0; column < COLUMNS; column += WIDTH) {
        const Vector before = load(most + column);
        Vector now = before;
        for (long j = 0; j < count; ++j) {
            const Vector score = load(scores + j * COLUMNS + column);
            now = score > now ? score : now;
        }
        const Vector base = now == NOTHING ? Vector{} : now;
        Vector total{};
        for (long j = 0; j < count; ++j) {
            const Vector weight = power_of_two(load(scores + j * COLUMNS + column) - base);
            store(scores + j * COLUMNS + column, weight);
            total += weight;
        }
        const Vector kept = power_of_two(before - base);
        store(most + column, now);
        store(totals + column, load(totals + column) * kept + total);
        for (long k = 0; k < head_dim; ++k) {
            float* value = values + k * COLUMNS + column;
            store(value, load(value) * kept);
        }
    }
}

// A vector of columns of scores (count, COLUMNS), of which column i sees the first sees(i) keys alone.
template <long COLUMNS, class Sees>
inline void hide(float* scores, long count, Sees sees) {
    Integers visible{};
    for (long i = 0; i < WIDTH; ++i) visible[i] = static_cast<int32_t>(sees(i));
    for (long j = 0; j < count; ++j) {
        float* at = scores + j * COLUMNS;
        store(at, visible > static_cast<int32_t>(j) ? load(at) : all(NOTHING));
    }
}

// Rows, of which some may be missing, become columns of `to` (head_dim, COLUMNS).
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

// And back, each column by a scale of its own.
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

// Many queries over the same positions, COLUMNS of them at a time. Queries and what they have seen lie on their side,
// a query being a column: keys and values are then left sides of products, read where they are, and a maximum over keys
// needs no lanes of a vector to meet.
template <int VECTORS>
void attend_many(const Step& step, const Item& item, long head, float* scratch) {
    constexpr long COLUMNS = VECTORS * WIDTH;
    const long group = step.group(), head_dim = step.head_dim, queries = item.queries;
    const long panels = (queries + COLUMNS - 1) / COLUMNS, columns = panels * COLUMNS;
    const long offset = head * head_dim;
    float* q = scratch;                         // by panel (head_dim, COLUMNS)
    float* values = q + columns * head_dim;     // the same
    float* most = values + columns * head_dim;  // (columns)
    float* totals = most + columns;             // the same
    float* scores = totals + columns;           // (KEYS, COLUMNS)
    float* gathered = scores + KEYS * COLUMNS;  // values (KEYS, head_dim)

    const auto row_of = [&](long query) { return step.order[item.rows + (item.query + query) / group]; };
    const auto head_of = [&](long query) { return head * group + (item.query + query) % group; };
    const auto place = [&](long query) { return row_of(query) * step.heads + head_of(query); };  // in out and scores
    const auto sees = [&](long query) { return item.seen + (item.query + query) / group * item.growth; };

    for (long query = 0; query < columns; query += WIDTH) {
        const float *asked[WIDTH], *known[WIDTH];
        for (long i = 0; i < WIDTH; ++i) {
            const bool exists = query + i < queries, continues = exists && item.continues;
            asked[i] = nullptr;
            if (exists) asked[i] = step.queries + row_of(query + i) * step.query_stride + head_of(query + i) * head_dim;
            known[i] = continues ? step.out + place(query + i) * head_dim : nullptr;
            most[query + i] = continues ? step.scores[place(query + i)] : NOTHING;
            totals[query + i] = continues ? 1.0f : 0.0f;
        }
        const long at = query / COLUMNS * head_dim * COLUMNS + query % COLUMNS;
        to_columns<COLUMNS>(asked, head_dim, step.scale, q + at);
        to_columns<COLUMNS>(known, head_dim, 1.0f, values + at);
    }
    const long last = sees(queries - 1);
    for (long position = item.from; position < last; position += KEYS) {
        const long count = last - position < KEYS ? last - position : KEYS;
        const float* slots[KEYS];
        step.find(item, position - item.from, count, slots);
        for (long j = 0; j < count; ++j)
            std::memcpy(gathered + j * head_dim, slots[j] + step.kv_heads * head_dim + offset,
                        head_dim * sizeof(float));
        for (long first = 0; first < columns; first += COLUMNS) {
            const long end = first + COLUMNS < queries ? first + COLUMNS : queries;
            // Rows come in order of position: where the last of a panel sees nothing here, none does.
            const long visible = sees(end - 1) - position < count ? sees(end - 1) - position : count;
            if (visible <= 0) continue;
            step.by_block(item, position, visible, [&](long j, long together) {
                multiply<VECTORS>(together, head_dim, {slots[j] + offset, step.slot(), 1}, q + first * head_dim,
                                  COLUMNS, scores + j * COLUMNS, COLUMNS, false);
            });
            for (long query = first; query < end && sees(query) < position + visible; query += WIDTH)
                hide<COLUMNS>(scores + query - first, visible, [&](long i) { return sees(query + i) - position; });
            float* seen = values + first * head_dim;
            weigh_columns<COLUMNS>(scores, visible, most + first, totals + first, seen, head_dim);
            multiply<VECTORS>(head_dim, visible, {gathered, 1, head_dim}, scores, COLUMNS, seen, COLUMNS, true);
        }
    }
    for (long query = 0; query < queries; query += WIDTH) {
        float* out[WIDTH];
        for (long i = 0; i < WIDTH; ++i) {
            const bool exists = query + i < queries;
            out[i] = exists ? step.out + place(query + i) * head_dim : nullptr;
            if (exists) step.scores[place(query + i)] = most[query + i] + std::log2(totals[query + i]);
        }
        const long at = query / COLUMNS * head_dim * COLUMNS + query % COLUMNS;
        to_rows<COLUMNS>(values + at, head_dim, 1.0f / load(totals + query), out);
    }
}
