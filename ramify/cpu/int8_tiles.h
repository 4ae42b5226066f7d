// Rows of x as integers times packed weights as integers: exact sums of 16 or 32 products, scaled and added up as
// numbers.
//
// A row is cut into blocks of 32. Of each, the largest magnitude becomes 127 and all others the nearest integers to
// scale:  x = scale * number. A run of weights is scale * number + minimum, so its part of the product is
//
//     scale of x * (scale of weights * sum(numbers of x * numbers of weights) + minimum * sum(numbers of x))
//
// Weights come as bytes that are OFFSET larger: OFFSET * sum(numbers of x) is where their sum begins, below zero.
#pragma once

#include "byte_products.h"

constexpr long INT8_BLOCK = 32;          // numbers of x that share a scale
constexpr long TOTALLED = 16;            // numbers of x whose sum is kept: the shortest run of weights
constexpr long BYTES_AT_ONCE = 256;      // weights of a column that are unpacked: 16 KiB of a panel, in the first cache
constexpr long BYTES_PREFETCHED = 2048;  // ahead in memory

// Up to how many rows the exact product takes no longer: it unpacks weights in registers, this one to the cache, which
// pays once several tiles of rows read them there.
template <class Format>
constexpr long most_exact_rows() {
    if constexpr (UNSIGNED_BYTES) return Format::NUMBER_BITS > 5 ? 6 : 4;
    if constexpr (!RAMIFY_PAIRS) return 0;
    if constexpr (Format::NUMBER_BITS == 8) return WIDTH == 16 ? 6 : 0;
    return 2;
}

// Rows as integers. In every eight numbers, those at even places come first: so do the weights.
struct Int8Rows {
    int8_t* numbers;  // (rows, depth)
    float* scales;    // (rows, depth / INT8_BLOCK)
    int32_t* totals;  // (rows, depth / TOTALLED)

    static long size(long rows, long depth) {
        return rows * (depth + depth / INT8_BLOCK * sizeof(float) + depth / TOTALLED * sizeof(int32_t));
    }
    static Int8Rows in(void* memory, long rows, long depth) {
        float* scales = static_cast<float*>(memory);
        int32_t* totals = reinterpret_cast<int32_t*>(scales + rows * (depth / INT8_BLOCK));
        return {reinterpret_cast<int8_t*>(totals + rows * (depth / TOTALLED)), scales, totals};
    }
};

// A product that is rounded by itself, not together with a sum: every processor then finds the same integers.
static inline Vector rounded(Vector product) {
#if defined(__AVX512F__)
    asm("" : "+v"(product));
#elif defined(__SSE2__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

// One block of x. Where it holds an infinity or a NaN, its scale is a NaN, and so is every sum.
static inline void quantise_block(const float* x, int8_t* numbers, float* scale, int32_t* totals) {
    Vector magnitudes{}, poison{};
#pragma GCC unroll 8
    for (long i = 0; i < INT8_BLOCK; i += WIDTH) {
        const Vector values = load(x + i), magnitude = (Vector)((Integers)values & 0x7fffffff);
        magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
        poison += values * 0.0f;
    }
    *scale = largest(magnitudes) / 127.0f;
    if (*scale < 0x1p-126f) *scale = 0.0f;  // its inverse would be infinite
    const float inverse = *scale > 0.0f && *scale < __builtin_inff() ? 1.0f / *scale : 0.0f;
    *scale += sum(poison);

    const float rounding = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    Vector total{};
#pragma GCC unroll 8
    for (long i = 0; i < INT8_BLOCK; i += WIDTH) {
        const Vector shifted = rounded(load(x + i) * inverse) + rounding;
        total += shifted - rounding;
        if ((i + WIDTH) % TOTALLED == 0) {
            const float summed = sum(total);  // a NaN is no integer, not even any one
            totals[i / TOTALLED] = summed == summed ? static_cast<int32_t>(summed) : 0;
            total = Vector{};
        }
        Bytes places{};
        const Bytes found = __builtin_convertvector((Integers)shifted, Bytes);
        if constexpr (WIDTH >= 8) {
            for (long lane = 0; lane < WIDTH; ++lane) places[lane] = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
            const Bytes ordered = __builtin_shuffle(found, places);
            memcpy(numbers + i, &ordered, WIDTH);
        } else {  // four numbers: 0 and 2 beside each other, 1 and 3 four places on
            for (long lane = 0; lane < WIDTH; ++lane)
                numbers[i / 8 * 8 + lane % 2 * 4 + i % 8 / 2 + lane / 2] = found[lane];
        }
    }
}

static inline void quantise_row(const Int8Rows& rows, const float* x, long row, long depth) {
    for (long k = 0; k < depth; k += INT8_BLOCK)
        quantise_block(x + row * depth + k, rows.numbers + row * depth + k,
                       rows.scales + (row * depth + k) / INT8_BLOCK, rows.totals + (row * depth + k) / TOTALLED);
}

// A part of a panel as bytes, with what makes numbers of them.
struct Unpacked {
    alignas(64) uint8_t bytes[BYTES_AT_ONCE * TILE_COLUMNS];                // (depth / 4, TILE_COLUMNS, 4)
    alignas(64) float scales[BYTES_AT_ONCE / TOTALLED * 2 * TILE_COLUMNS];  // (sums, 2, TILE_COLUMNS): and minima
    int32_t offset;                                                         // by which the bytes are larger
};

// Weights of a column whose products are added up as integers: a run, or a block of x where that is shorter.
template <class Format>
constexpr long SUMMED = Format::RUN < INT8_BLOCK ? Format::RUN : INT8_BLOCK;

template <class Format>
static inline void unpack_bytes(const uint8_t* panel, long begin, long end, Unpacked& to) {
    float* scales = to.scales;
    to.offset = Format::OFFSET;
    for (long first = begin; first < end; first += SUMMED<Format>, scales += 2 * TILE_COLUMNS) {
        const uint8_t* unit = panel + first / Format::UNIT * Format::UNIT_BYTES;
        const long inside = first % Format::UNIT, share = Format::UNIT_BYTES * SUMMED<Format> / Format::UNIT;
        for (long line = 0; line < share; line += 64)
            __builtin_prefetch(unit + inside / SUMMED<Format> * share + BYTES_PREFETCHED + line, 0, 2);
#pragma GCC unroll 8
        for (long part = 0; part < TILE_VECTORS; ++part) {
            const auto scale = Format::scale(unit, inside / Format::RUN, part);
            store(scales + part * WIDTH, scale.scale);
            if (Format::KINDS > 1) store(scales + TILE_COLUMNS + part * WIDTH, scale.minimum);
        }
#pragma GCC unroll 4
        for (long k = 0; k < SUMMED<Format>; k += 8)
#pragma GCC unroll 8
            for (long part = 0; part < TILE_VECTORS; ++part) {
                const auto eight = Format::eight(unit, inside + k, part);
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; ++odd) {
                    const Integers four = Format::bytes(eight, odd);
                    memcpy(to.bytes + (first - begin + k + 4 * odd) * TILE_COLUMNS + part * WIDTH * 4, &four,
                           sizeof(four));
                }
            }
    }
}

// -- products ---------------------------------------------------------------------------------------------------

// What a tile needs to know of a format once its weights are bytes. Formats of the same kind share their code.
template <long OF_RUN, long OF_KINDS, int OF_BITS>
struct TileKind {
    static constexpr long RUN = OF_RUN, KINDS = OF_KINDS;
    static constexpr int BITS = OF_BITS;
};

// The bits of a number matter only where pairs of products are added up, and to plain vectors if they are eight.
template <class Format>
using KindOf = TileKind<SUMMED<Format>, Format::KINDS, RAMIFY_PAIRS || !UNSIGNED_BYTES ? Format::NUMBER_BITS : 0>;

// How many rows are multiplied at once: as many as have registers for their sums.
template <int BITS>
constexpr int INT8_TILE_ROWS = RAMIFY_PAIRS && WIDTH == 8       ? (BITS == 4 ? 4 : 3)
                               : RAMIFY_PAIRS || UNSIGNED_BYTES ? TILE_ROWS
                                                                : 2;

// sums (ROWS x TILE_COLUMNS) += rows `first` .. * a part of a panel, from `begin` on; they begin at zero there.
template <class Kind, int ROWS>
static inline void multiply_int8_tile(const Int8Rows& x, long first, long depth, const Unpacked& weights, long begin,
                                      long end, float* sums) {
    constexpr int BITS = Kind::BITS;
    for (long k = begin; k < end; k += Kind::RUN) {
        const uint8_t* bytes = weights.bytes + (k - begin) * TILE_COLUMNS;
        const float* scales = weights.scales + (k - begin) / Kind::RUN * 2 * TILE_COLUMNS;
        const int8_t* numbers = x.numbers + first * depth + k;
        int32_t totals[ROWS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const int32_t* found = x.totals + ((first + row) * depth + k) / TOTALLED;
            totals[row] = Kind::RUN > TOTALLED ? found[0] + found[1] : found[0];
        }
        Integers products[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
            for (int part = 0; part < TILE_VECTORS; ++part)
                products[row][part] = broadcast_integer(-weights.offset * totals[row]);

        const auto load_weights = [&](long step, Integers* found) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int part = 0; part < TILE_VECTORS; ++part)
                memcpy(&found[part], bytes + (step * TILE_COLUMNS + part * WIDTH) * 4, sizeof(Integers));
        };
        const auto four_numbers = [&](int row, long step) __attribute__((always_inline)) {
            int32_t four;
            memcpy(&four, numbers + row * depth + 4 * step, 4);
            return broadcast_integer(four);
        };
        Integers line[TILE_VECTORS];
#if RAMIFY_PAIRS
        constexpr long STEPS = STEPS_IN_16_BITS<BITS> < Kind::RUN / 4 ? STEPS_IN_16_BITS<BITS> : Kind::RUN / 4;
#pragma GCC unroll 8
        for (long group = 0; group < Kind::RUN / 4; group += STEPS) {
            Shorts added[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
            for (long step = 0; step < STEPS; ++step) {
                load_weights(group + step, line);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row) {
                    const Integers four = four_numbers(row, group + step);
#pragma GCC unroll 8
                    for (int part = 0; part < TILE_VECTORS; ++part) {
                        const Shorts made = (Shorts)pairs<BITS>(line[part], four);
                        added[row][part] = step ? added[row][part] + made : made;
                    }
                }
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int part = 0; part < TILE_VECTORS; ++part)
                    products[row][part] = add_pairs(products[row][part], added[row][part]);
        }
#else
#pragma GCC unroll 8
        for (long step = 0; step < Kind::RUN / 4; ++step) {
            load_weights(step, line);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                const Integers four = four_numbers(row, step);
#pragma GCC unroll 8
                for (int part = 0; part < TILE_VECTORS; ++part)
                    products[row][part] = add_products<BITS>(products[row][part], line[part], four);
            }
        }
#endif
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const float scale = x.scales[((first + row) * depth + k) / INT8_BLOCK];
            float* to = sums + row * TILE_COLUMNS;
#pragma GCC unroll 8
            for (int part = 0; part < TILE_VECTORS; ++part) {
                Vector value = k > 0 ? load(to + part * WIDTH) : Vector{};
                value += __builtin_convertvector(products[row][part], Vector) * (scale * load(scales + part * WIDTH));
                if constexpr (Kind::KINDS > 1)
                    value += scale * static_cast<float>(totals[row]) * load(scales + TILE_COLUMNS + part * WIDTH);
                store(to + part * WIDTH, value);
            }
        }
    }
}

// The same for any number of rows up to INT8_TILE_ROWS.
template <class Kind, int ROWS = 1>
__attribute__((noinline)) static void multiply_int8_rows(long rows, const Int8Rows& x, long first, long depth,
                                                         const Unpacked& weights, long begin, long end, float* sums) {
    if (rows == ROWS) return multiply_int8_tile<Kind, ROWS>(x, first, depth, weights, begin, end, sums);
    if constexpr (ROWS < INT8_TILE_ROWS<Kind::BITS>)
        multiply_int8_rows<Kind, ROWS + 1>(rows, x, first, depth, weights, begin, end, sums);
}

// sums (rows x TILE_COLUMNS) = rows `first` .. of x * panel. Runs are added up in the order of depth, however many rows
// there are.
template <class Format>
static inline void multiply_int8_panel(const Int8Rows& x, const uint8_t* panel, long first, long rows, long depth,
                                       float* sums) {
    constexpr long AT_ONCE = INT8_TILE_ROWS<Format::NUMBER_BITS>;
    const long tiles = (rows + AT_ONCE - 1) / AT_ONCE;
    Unpacked weights;
    for (long begin = 0; begin < depth; begin += BYTES_AT_ONCE) {
        const long end = depth - begin < BYTES_AT_ONCE ? depth : begin + BYTES_AT_ONCE;
        unpack_bytes<Format>(panel, begin, end, weights);
        for (long tile = 0, row = 0, count; tile < tiles; ++tile, row += count) {
            count = (rows - row + tiles - tile - 1) / (tiles - tile);
            multiply_int8_rows<KindOf<Format>>(count, x, first + row, depth, weights, begin, end,
                                               sums + row * TILE_COLUMNS);
        }
    }
}
