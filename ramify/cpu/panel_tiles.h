// Some rows of x times a part of a packed panel, for every number format.
#pragma once

#include "formats.h"

constexpr long DEPTH_AT_ONCE = 512;  // of numbers: 128 KiB of a panel stay in the second cache
constexpr long FEW_ROWS = 4 * TILE_ROWS;
constexpr long DEPTH_OF_FEW = 4096 / TILE_COLUMNS;  // for so few rows: 16 KiB, in the first cache for all their tiles
constexpr long UNPACKED_AT_ONCE = 256;  // of packed weights, as numbers: sums are then read and written rarely enough
constexpr long ROWS_AT_ONCE = 192;      // of x: they stay in the second cache while panels pass by
constexpr long PREFETCHED = 2048;       // bytes ahead: memory's own prefetching ends where a page does

// How many rows are multiplied at once by weights that are unpacked in registers. From twice as many rows on, it is
// faster to unpack them into the cache.
template <class Format>
constexpr long PACKED_ROWS = WIDTH == 16 || !Format::IN_TWO_WORDS ? 4 : 2;

// Calls act(k, weights) for the weights begin .. end - 1 of depth in order; begin and end are multiples of a run.
// `weights` are VECTORS vectors, from vector `part` on. AHEAD: what follows in memory is prefetched.
template <class Format, int VECTORS, bool AHEAD, class Act>
static inline void for_each_weight(const uint8_t* panel, long begin, long end, long part, Act act) {
    Vector weights[VECTORS];
    for (long first = begin; first < end; first += Format::RUN) {
        const uint8_t* unit = panel + first / Format::UNIT * Format::UNIT_BYTES;
        const long inside = first % Format::UNIT, share = Format::UNIT_BYTES * Format::RUN / Format::UNIT;
        if (AHEAD)
            for (long line = 0; line < share; line += 64)
                __builtin_prefetch(unit + inside / Format::RUN * share + PREFETCHED + line, 0, 2);
        if constexpr (Format::UNIT == 1) {
#pragma GCC unroll 8
            for (int vector = 0; vector < VECTORS; ++vector) weights[vector] = Format::weight(unit, part + vector);
            act(first, weights);
        } else {
            typename Format::Scale scales[VECTORS];
#pragma GCC unroll 8
            for (int vector = 0; vector < VECTORS; ++vector)
                scales[vector] = Format::scale(unit, inside / Format::RUN, part + vector);
            for (long k = 0; k < Format::RUN; k += 8) {
                typename Format::Eight eights[VECTORS];
#pragma GCC unroll 8
                for (int vector = 0; vector < VECTORS; ++vector)
                    eights[vector] = Format::eight(unit, inside + k, part + vector);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 8
                    for (int vector = 0; vector < VECTORS; ++vector)
                        weights[vector] = Format::weight(eights[vector], i, scales[vector]);
                    act(first + k + i, weights);
                }
            }
        }
    }
}

// to (ROWS x TILE_COLUMNS) = x (ROWS x depth) * panel: weights are unpacked in registers.
template <class Format, int ROWS>
static inline void multiply_packed_rows(const float* x, long stride, const uint8_t* panel, long depth, float* to) {
    Vector sums[ROWS][TILE_VECTORS] = {};
    const auto add = [&](long k, const Vector* weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
            for (int part = 0; part < TILE_VECTORS; ++part) sums[row][part] += x[row * stride + k] * weights[part];
    };
    for_each_weight<Format, TILE_VECTORS, true>(panel, 0, depth, 0, add);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int part = 0; part < TILE_VECTORS; ++part) store(to + row * TILE_COLUMNS + part * WIDTH, sums[row][part]);
}

// The same for any number of rows up to PACKED_ROWS.
template <class Format>
static inline void multiply_few_rows(long rows, const float* x, const uint8_t* panel, long depth, float* to) {
    if (rows == 1) return multiply_packed_rows<Format, 1>(x, depth, panel, depth, to);
    if (rows == 2) return multiply_packed_rows<Format, 2>(x, depth, panel, depth, to);
    if constexpr (PACKED_ROWS<Format> > 2) {
        if (rows == 3) return multiply_packed_rows<Format, 3>(x, depth, panel, depth, to);
        if (rows == 4) return multiply_packed_rows<Format, 4>(x, depth, panel, depth, to);
    }
}

// to (end - begin x VECTORS vectors): a part of a panel as numbers.
template <class Format, int VECTORS>
static inline void unpack(const uint8_t* panel, long begin, long end, long part, float* to) {
    const auto write = [&](long k, const Vector* weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int vector = 0; vector < VECTORS; ++vector)
            store(to + ((k - begin) * VECTORS + vector) * WIDTH, weights[vector]);
    };
    for_each_weight<Format, VECTORS, false>(panel, begin, end, part, write);
}

// sums (rows x TILE_COLUMNS) = x (rows x depth, `stride` apart) * numbers (depth x TILE_COLUMNS), or added to what is
// there. Compiled once, for all formats.
__attribute__((noinline)) static void multiply_numbers(long rows, long depth, const float* x, long stride,
                                                       const float* numbers, float* sums, bool accumulate,
                                                       const void* ahead, long lines) {
    multiply<TILE_VECTORS>(rows, depth, {x, stride, 1}, numbers, TILE_COLUMNS, sums, TILE_COLUMNS, accumulate, ahead,
                           lines);
}

// sums (rows x TILE_COLUMNS) = x (rows x depth) * panel. Every element is summed in the order of depth with the same
// numbers, whichever way is taken.
template <class Format>
static inline void multiply_panel(const float* x, const uint8_t* panel, long rows, long depth, float* sums) {
    if constexpr (Format::UNIT_BYTES == 4 * TILE_COLUMNS) {
        const long at_once = rows > FEW_ROWS ? DEPTH_AT_ONCE : DEPTH_OF_FEW;
        for (long k = 0; k < depth; k += at_once) {
            const long some = depth - k < at_once ? depth - k : at_once;
            // While several tiles of rows are multiplied by this part of the panel, the next part is prefetched.
            const float* part = reinterpret_cast<const float*>(panel) + k * TILE_COLUMNS;
            const long lines = rows > TILE_ROWS ? some * TILE_COLUMNS / 16 : 0;
            multiply_numbers(rows, some, x + k, depth, part, sums, k > 0, part + some * TILE_COLUMNS, lines);
        }
    } else if (rows <= 2 * PACKED_ROWS<Format>) {
        const long tiles = (rows + PACKED_ROWS<Format> - 1) / PACKED_ROWS<Format>;
        for (long tile = 0, row = 0, count; tile < tiles; ++tile, row += count) {
            count = (rows - row + tiles - tile - 1) / (tiles - tile);
            multiply_few_rows<Format>(count, x + row * depth, panel, depth, sums + row * TILE_COLUMNS);
        }
    } else {
        alignas(64) float unpacked[UNPACKED_AT_ONCE * TILE_COLUMNS];
        for (long k = 0; k < depth; k += UNPACKED_AT_ONCE) {
            const long some = depth - k < UNPACKED_AT_ONCE ? depth - k : UNPACKED_AT_ONCE;
            unpack<Format, TILE_VECTORS>(panel, k, k + some, 0, unpacked);
            const long bytes = some * Format::UNIT_BYTES / Format::UNIT;
            multiply_numbers(rows, some, x + k, depth, unpacked, sums, k > 0,
                             panel + (k + some) * Format::UNIT_BYTES / Format::UNIT, bytes / 64);
        }
    }
}
