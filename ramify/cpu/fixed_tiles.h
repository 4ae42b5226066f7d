// Few rows of x as fixed-point numbers times packed weights as integers: as exact as float32, and faster.
//
// A row is cut into blocks of 32. In each, x = scale * number, with a power of two for the scale and 24 bits for the
// numbers; so they are off by at most 2^-23 of the block's largest magnitude, which is the last bit of a float32 there.
// A number is three bytes with signs, its digits:  number = 65536 * first + 256 * second + third. Each is multiplied by
// the weights' integers, 64 products an instruction where float32 has 16, and all sums of a run are exact. They are
// then scaled and added up as float32, run by run.
//
// Weights come as bytes that are OFFSET larger: -OFFSET * sum(digits of x) is where the sums begin.
#pragma once

#include "byte_products.h"

constexpr long FIXED_BLOCK = 32;         // numbers of x that share a scale
constexpr long DIGITS = 3;               // of a number
constexpr long FIXED_DEPTH = 256;        // that a vector of columns goes before the next one does
constexpr long FIXED_PREFETCHED = 8192;  // bytes beyond that, into the second cache

constexpr int FIXED_TILE_ROWS = 4;                  // that are multiplied at once
constexpr int FIXED_VECTORS = WIDTH == 16 ? 2 : 1;  // of columns, for whose weights there are registers
constexpr long EVERY = 1l << 40;                    // any number of rows

// Up to how many rows fixed-point numbers may be the form of x. With an instruction for four products that is any
// number, and eight bits do not fit the sums of two that other processors have.
template <class Format>
constexpr long fixed_rows() {
    if constexpr (Format::HOLDS_INTEGERS) {
        if (UNSIGNED_BYTES) return EVERY;
        if (RAMIFY_PAIRS && Format::NUMBER_BITS < 8) return 2;
    }
    return 0;
}

// Up to how many rows they are the fastest form. has_wide_products: whether the processor makes two products of float32
// vectors at a time, each at full width; then many rows are faster as they are.
template <class Format>
static inline long fastest_fixed_rows(bool has_wide_products) {
    if constexpr (fixed_rows<Format>() == EVERY)
        if (has_wide_products) return !Format::HAS_FACTORS ? 32 : Format::RUN == FIXED_BLOCK ? 12 : 8;
    return fixed_rows<Format>();
}

struct FixedBlock {
    float scale, sum;                           // the sum of x
    int32_t sums[DIGITS];                       // of digits
    int32_t half_sums[2][DIGITS];               // of the first 16, and of the others
    int8_t digits[FIXED_BLOCK / 8][DIGITS][8];  // of every eight numbers, those at even places come first
};

struct FixedRows {
    FixedBlock* blocks;  // (rows, depth / FIXED_BLOCK)

    static long size(long rows, long depth) { return rows * (depth / FIXED_BLOCK) * sizeof(FixedBlock); }
};

// numbers (FIXED_BLOCK), 0x808080 larger -> digits, and their sums.
static inline void write_digits(const int32_t* numbers, FixedBlock& block) {
#if defined(__AVX2__)
    // Of four numbers: first digits, second, third; in each those at places 0, 2, 1, 3.
    const __m128i order = _mm_setr_epi8(2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, 3, 11, 7, 15);
    const __m128i sign = _mm_set1_epi8(-128);
    for (long half = 0; half < 2; ++half) {
        __m128i upper_sums{}, lower_sums{};
#pragma GCC unroll 2
        for (long eight = 2 * half; eight < 2 * half + 2; ++eight) {
            const __m128i* from = reinterpret_cast<const __m128i*>(numbers + eight * 8);
            const __m128i one = _mm_shuffle_epi8(_mm_load_si128(from), order);
            const __m128i two = _mm_shuffle_epi8(_mm_load_si128(from + 1), order);
            const __m128i upper = _mm_unpacklo_epi16(one, two), lower = _mm_unpackhi_epi16(one, two);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(block.digits[eight][0]), _mm_xor_si128(upper, sign));
            _mm_storel_epi64(reinterpret_cast<__m128i*>(block.digits[eight][2]), _mm_xor_si128(lower, sign));
            upper_sums = _mm_add_epi64(upper_sums, _mm_sad_epu8(upper, __m128i{}));
            lower_sums = _mm_add_epi64(lower_sums, _mm_sad_epu8(lower, __m128i{}));
        }
        block.half_sums[half][0] = _mm_cvtsi128_si32(upper_sums) - 16 * 128;
        block.half_sums[half][1] = _mm_extract_epi32(upper_sums, 2) - 16 * 128;
        block.half_sums[half][2] = _mm_cvtsi128_si32(lower_sums) - 16 * 128;
    }
#else
    memset(block.half_sums, 0, sizeof(block.half_sums));
    for (long i = 0; i < FIXED_BLOCK; ++i)
        for (long digit = 0; digit < DIGITS; ++digit) {
            const int8_t found = static_cast<int8_t>((numbers[i] >> (16 - 8 * digit)) ^ 128);
            block.digits[i / 8][digit][i % 2 * 4 + i % 8 / 2] = found;
            block.half_sums[i / 16][digit] += found;
        }
#endif
}

// A block of x. Where it holds an infinity or a NaN, its scale and its sum are NaN, and so is every product.
static inline void make_fixed(const float* x, FixedBlock& block) {
    Vector most{}, poison{};
#pragma GCC unroll 8
    for (long i = 0; i < FIXED_BLOCK; i += WIDTH) {
        const Vector values = load(x + i), magnitudes = (Vector)((Integers)values & 0x7fffffff);
        most = magnitudes > most ? magnitudes : most;
        poison += values * 0.0f;
    }
    // The largest number is below 2^23 * (1 - 2^-7): with more, its first digit could be 128. Of a block so small that
    // its scale would not be a normal float, nothing is left.
    const float top = largest(most);
    uint32_t bits;
    memcpy(&bits, &top, 4);
    const uint32_t exponent = (bits + 0x20000) >> 23;  // 127 larger than it is
    const uint32_t scale = exponent > 22 ? (exponent - 22) << 23 : 0;
    const uint32_t inverse = exponent > 22 ? (254 + 22 - exponent) << 23 : 0;
    float factor;
    memcpy(&block.scale, &scale, 4);
    memcpy(&factor, &inverse, 4);
    block.scale += sum(poison);

    // Each digit 128 larger, without a sign: so bytes can be added up by one instruction.
    alignas(64) int32_t numbers[FIXED_BLOCK];
#pragma GCC unroll 8
    for (long i = 0; i < FIXED_BLOCK; i += WIDTH) {
        const Integers found = nearest_integers(load(x + i) * factor) + 0x808080;
        memcpy(numbers + i, &found, sizeof(found));
    }
    write_digits(numbers, block);
    double total = 0;
#pragma GCC unroll 3
    for (long digit = 0; digit < DIGITS; ++digit) {
        block.sums[digit] = block.half_sums[0][digit] + block.half_sums[1][digit];
        total = total * 256 + block.sums[digit];
    }
    block.sum = static_cast<float>(total) * block.scale;
}

static inline void make_fixed_row(const FixedRows& rows, const float* x, long row, long depth) {
    for (long k = 0; k < depth; k += FIXED_BLOCK)
        make_fixed(x + row * depth + k, rows.blocks[(row * depth + k) / FIXED_BLOCK]);
}

// The products of some vectors of weights with a row's numbers, not yet scaled. `first` is the place of the weights in
// the block. Four numbers are read once for all of the vectors: with fewer vectors, reading them is what takes the
// time.
template <class Format, long RUN, int VECTORS>
static inline void fixed_products(const Integers (*weights)[RUN / 4], const FixedBlock& numbers, long first,
                                  Vector* found) {
    const int32_t* totals = RUN == FIXED_BLOCK ? numbers.sums : numbers.half_sums[first / RUN];
    Integers products[VECTORS][DIGITS];
#pragma GCC unroll 3
    for (long digit = 0; digit < DIGITS; ++digit) {
        Integers own[VECTORS];
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            own[vector] = Format::OFFSET ? broadcast_integer(-Format::OFFSET * totals[digit]) : Integers{};
        add_all_products<Format::NUMBER_BITS, RUN / 4, VECTORS>(
            own, weights, [&](long step) __attribute__((always_inline)) {
                int32_t four;
                memcpy(&four, numbers.digits[first / 8 + step / 2][digit] + step % 2 * 4, 4);
                return broadcast_integer(four);
            });
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector) products[vector][digit] = own[vector];
    }
    // The first two digits' sums fit 32 bits together.
#pragma GCC unroll 4
    for (int vector = 0; vector < VECTORS; ++vector) {
        const Vector upper = __builtin_convertvector((products[vector][0] << 8) + products[vector][1], Vector);
        found[vector] = upper * 256.0f + __builtin_convertvector(products[vector][2], Vector);
    }
}

// to (ROWS x TILE_COLUMNS) = rows `first` .. of x * panel. Runs are added up in the order of depth, however many rows
// there are. Some vectors of columns at a time go some way along the depth: as many as fit the registers with what they
// need, and the first cache keeps the rest.
template <class Format, int ROWS>
static inline void multiply_fixed_tile(const FixedRows& x, long first, const uint8_t* panel, long depth, float* to) {
    constexpr long UNIT = Format::UNIT, RUN = Format::RUN < FIXED_BLOCK ? Format::RUN : FIXED_BLOCK;
    constexpr int VECTORS = FIXED_VECTORS;
    constexpr long AHEAD = Format::UNIT_BYTES * RUN / UNIT * VECTORS / TILE_VECTORS;  // bytes to prefetch for their run
    const long blocks = depth / FIXED_BLOCK;
    Vector sums[ROWS][TILE_VECTORS] = {};
    for (long begin = 0; begin < depth; begin += FIXED_DEPTH) {
        const long end = depth - begin < FIXED_DEPTH ? depth : begin + FIXED_DEPTH;
        const uint8_t* ahead = panel + end / UNIT * Format::UNIT_BYTES + FIXED_PREFETCHED;
#pragma GCC unroll 8
        for (int part = 0; part < TILE_VECTORS; part += VECTORS) {
            for (long k = begin; k < end; k += UNIT) {
                const uint8_t* unit = panel + k / UNIT * Format::UNIT_BYTES;
                const FixedBlock* block = x.blocks + first * blocks + k / FIXED_BLOCK;
                Vector unit_sums[ROWS][VECTORS] = {}, unit_minima[ROWS][VECTORS] = {};
#pragma GCC unroll 1
                for (long inside = 0; inside < UNIT; inside += RUN, ahead += AHEAD) {
#pragma GCC unroll 16
                    for (long line = 0; line < AHEAD; line += 64) __builtin_prefetch(ahead + line, 0, 2);
                    Integers weights[VECTORS][RUN / 4];
                    typename Format::Scale factors[VECTORS];
#pragma GCC unroll 4
                    for (int vector = 0; vector < VECTORS; ++vector) {
#pragma GCC unroll 8
                        for (long step = 0; step < RUN / 4; step += 2) {
                            const auto eight = Format::eight(unit, inside + 4 * step, part + vector);
                            weights[vector][step] = Format::bytes(eight, 0);
                            weights[vector][step + 1] = Format::bytes(eight, 1);
                        }
                        if constexpr (Format::HAS_FACTORS)
                            factors[vector] = Format::factors(unit, inside / Format::RUN, part + vector);
                    }
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; ++row) {
                        const FixedBlock& numbers = block[row * blocks + inside / FIXED_BLOCK];
                        Vector products[VECTORS];
                        fixed_products<Format, RUN, VECTORS>(weights, numbers, inside % FIXED_BLOCK, products);
#pragma GCC unroll 4
                        for (int vector = 0; vector < VECTORS; ++vector) {
                            Vector &sum = unit_sums[row][vector], &minimum = unit_minima[row][vector];
                            if constexpr (Format::HAS_FACTORS) {
                                sum += products[vector] * (numbers.scale * factors[vector].scale);
                                if (Format::KINDS > 1) minimum += numbers.sum * factors[vector].minimum;
                            } else {
                                const Vector own = products[vector] * numbers.scale;
                                sum = UNIT == RUN ? own : sum + own;
                                if (Format::KINDS > 1)
                                    minimum = UNIT == RUN ? broadcast(numbers.sum) : minimum + numbers.sum;
                            }
                        }
                    }
                }
#pragma GCC unroll 4
                for (int vector = 0; vector < VECTORS; ++vector) {
                    const auto scale = Format::unit_scale(unit, part + vector);
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; ++row) {
                        Vector& sum = sums[row][part + vector];
                        sum += unit_sums[row][vector] * scale.scale;
                        if constexpr (Format::KINDS > 1) sum += unit_minima[row][vector] * scale.minimum;
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int part = 0; part < TILE_VECTORS; ++part) store(to + row * TILE_COLUMNS + part * WIDTH, sums[row][part]);
}

// The same for any number of rows up to FIXED_TILE_ROWS.
template <class Format, int ROWS = 1>
static inline void multiply_fixed_rows(long rows, const FixedRows& x, long first, const uint8_t* panel, long depth,
                                       float* to) {
    if (rows == ROWS) return multiply_fixed_tile<Format, ROWS>(x, first, panel, depth, to);
    if constexpr (ROWS < FIXED_TILE_ROWS && ROWS < fixed_rows<Format>())
        multiply_fixed_rows<Format, ROWS + 1>(rows, x, first, panel, depth, to);
}

// sums (rows x TILE_COLUMNS) = rows `first` .. of x * panel.
template <class Format>
static inline void multiply_fixed_panel(const FixedRows& x, const uint8_t* panel, long first, long rows, long depth,
                                        float* sums) {
    const long tiles = (rows + FIXED_TILE_ROWS - 1) / FIXED_TILE_ROWS;
    for (long tile = 0, row = 0, count; tile < tiles; ++tile, row += count) {
        count = (rows - row + tiles - tile - 1) / (tiles - tile);
        multiply_fixed_rows<Format>(count, x, first + row, panel, depth, sums + row * TILE_COLUMNS);
    }
}
