// A machine's vectors, the tile of a product that fits its registers, and an exponential.
#pragma once

#include <cstdint>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr long WIDTH = 16, TILE_VECTORS = 4;  // 6 x 4 sums, 4 of the right side, 1 of the left: 29 of 32 registers
#elif defined(__AVX__)
constexpr long WIDTH = 8, TILE_VECTORS = 2;  // 6 x 2 + 2 + 1: 15 of 16
#else
constexpr long WIDTH = 4, TILE_VECTORS = 2;
#endif
constexpr long TILE_ROWS = 6, TILE_COLUMNS = TILE_VECTORS * WIDTH;

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
typedef float Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

static inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
static inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
static inline Vector broadcast(float value) { return value - Vector{}; }

static inline Vector larger(Vector one, Vector two) { return one > two ? one : two; }
static inline Vector smaller(Vector one, Vector two) { return one < two ? one : two; }

// The vector at `from`, of which there are `count` numbers; what is missing becomes `fill`.
static inline Vector load_some(const float* from, long count, float fill) {
    if (count >= WIDTH) return load(from);
    float padded[WIDTH];
    for (long lane = 0; lane < WIDTH; ++lane) padded[lane] = lane < count ? from[lane] : fill;
    return load(padded);
}

static inline void store_some(float* to, long count, Vector value) {
    if (count >= WIDTH) return store(to, value);
    for (long lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

// For magnitudes below 2^23. GCC's own conversion goes through single numbers.
static inline Integers nearest_integers(Vector values) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtps_epi32((__m512)values);
#elif defined(__AVX__)
    return (Integers)_mm256_cvtps_epi32((__m256)values);
#else
    return __builtin_convertvector(values + (values < 0.0f ? broadcast(-0.5f) : broadcast(0.5f)), Integers);
#endif
}

// Whether a comparison came true in some lane.
static inline bool any(Integers comparison) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)comparison, (__m512i)comparison);
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)comparison);
#else
    bool found = false;
    for (long lane = 0; lane < WIDTH; ++lane) found |= comparison[lane] != 0;
    return found;
#endif
}

// Lane l of the result is lane l ^ DISTANCE of the argument.
template <long DISTANCE>
static inline Vector swapped(Vector values) {
    Integers lanes{};
    for (long lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane ^ DISTANCE;
    return __builtin_shuffle(values, lanes);
}

template <long DISTANCE = WIDTH / 2>
static inline float sum(Vector values) {
    values += swapped<DISTANCE>(values);
    if constexpr (DISTANCE > 1) return sum<DISTANCE / 2>(values);
    return values[0];
}

template <long DISTANCE = WIDTH / 2>
static inline float largest(Vector values) {
    const Vector other = swapped<DISTANCE>(values);
    values = other > values ? other : values;
    if constexpr (DISTANCE > 1) return largest<DISTANCE / 2>(values);
    return values[0];
}

// Lane l of the result is the sum of vector l, added up in the same order as in `sum`.
template <long DISTANCE = WIDTH / 2>
static inline Vector sums(Vector* vectors) {
    Integers own{}, other{};
    for (long lane = 0; lane < WIDTH; ++lane) {
        const long source = lane & DISTANCE ? WIDTH : 0;  // the first vector, or the second
        own[lane] = source + lane;
        other[lane] = source + (lane ^ DISTANCE);
    }
#pragma GCC unroll 8
    for (long i = 0; i < DISTANCE; ++i) {
        const Vector one = vectors[i], two = vectors[i + DISTANCE];
        vectors[i] = __builtin_shuffle(one, two, own) + __builtin_shuffle(one, two, other);
    }
    if constexpr (DISTANCE > 1) return sums<DISTANCE / 2>(vectors);
    return vectors[0];
}

// Lane i of vector j becomes lane j of vector i.
template <long DISTANCE = WIDTH / 2>
static inline void transpose(Vector* vectors) {
    Integers first{}, second{};
    for (long lane = 0; lane < WIDTH; ++lane) {
        first[lane] = lane & DISTANCE ? WIDTH + (lane ^ DISTANCE) : lane;
        second[lane] = lane & DISTANCE ? WIDTH + lane : lane ^ DISTANCE;
    }
#pragma GCC unroll 16
    for (long i = 0; i < WIDTH; ++i) {
        if (i & DISTANCE) continue;
        const Vector one = vectors[i], two = vectors[i + DISTANCE];
        vectors[i] = __builtin_shuffle(one, two, first);
        vectors[i + DISTANCE] = __builtin_shuffle(one, two, second);
    }
    if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(vectors);
}

// 2^x to 3 units in the last place. Becomes 0 and infinity half a power before floats do; NaN stays NaN.
static inline Vector power_of_two(Vector x) {
    x = x < -127.0f ? broadcast(-127.0f) : x;
    x = x > 128.0f ? broadcast(128.0f) : x;
    const float rounding = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    const Vector shifted = x + rounding;
    const Vector rest = x - (shifted - rounding);  // -1/2 .. 1/2
    Vector value = broadcast(1.54034892e-4f);      // the series of 2^rest
    value = value * rest + 1.33335581e-3f;
    value = value * rest + 9.61812911e-3f;
    value = value * rest + 5.55041087e-2f;
    value = value * rest + 2.40226507e-1f;
    value = value * rest + 6.93147182e-1f;
    value = value * rest + 1.0f;
    return value * (Vector)(((Integers)shifted << 23) + 0x3f800000);  // the integer as an exponent
}

static inline Vector exponential(Vector x) { return power_of_two(x * 1.44269504f); }

// The left side of a product: element (row, k) lies at begin + row * row_stride + k * depth_stride.
struct Left {
    const float* begin;
    long row_stride, depth_stride;
};

// What will be multiplied next: with each element of depth, so many cache lines of it are prefetched.
struct Ahead {
    const char* begin;
    long lines;
};

// to (ROWS x VECTORS vectors) = left (ROWS x depth) * right (depth x VECTORS vectors), added to what is there if
// `accumulate`. Every element is summed in the order of depth, however many rows there are.
template <int ROWS, int VECTORS>
static inline void multiply_tile(Left left, const float* right, long right_stride, float* to, long to_stride,
                                 long depth, bool accumulate, Ahead ahead) {
    Vector sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; ++part)
            sums[row][part] = accumulate ? load(to + row * to_stride + part * WIDTH) : Vector{};
    for (long k = 0; k < depth; ++k) {
        for (long line = 0; line < ahead.lines; ++line)
            __builtin_prefetch(ahead.begin + (k * ahead.lines + line) * 64, 0, 2);  // into the second cache
        Vector line[VECTORS];
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; ++part) line[part] = load(right + k * right_stride + part * WIDTH);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const float factor = left.begin[row * left.row_stride + k * left.depth_stride];
#pragma GCC unroll 8
            for (int part = 0; part < VECTORS; ++part) sums[row][part] += factor * line[part];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; ++part) store(to + row * to_stride + part * WIDTH, sums[row][part]);
}

// The same for any number of rows up to TILE_ROWS.
template <int VECTORS>
static inline void multiply_rows(long rows, Left left, const float* right, long right_stride, float* to, long to_stride,
                                 long depth, bool accumulate, Ahead ahead) {
    switch (rows) {
        case 1:
            return multiply_tile<1, VECTORS>(left, right, right_stride, to, to_stride, depth, accumulate, ahead);
        case 2:
            return multiply_tile<2, VECTORS>(left, right, right_stride, to, to_stride, depth, accumulate, ahead);
        case 3:
            return multiply_tile<3, VECTORS>(left, right, right_stride, to, to_stride, depth, accumulate, ahead);
        case 4:
            return multiply_tile<4, VECTORS>(left, right, right_stride, to, to_stride, depth, accumulate, ahead);
        case 5:
            return multiply_tile<5, VECTORS>(left, right, right_stride, to, to_stride, depth, accumulate, ahead);
        case 6:
            return multiply_tile<6, VECTORS>(left, right, right_stride, to, to_stride, depth, accumulate, ahead);
    }
}

// Any number of rows. While they are multiplied, `lines` cache lines from `ahead` on are prefetched.
template <int VECTORS>
static inline void multiply(long rows, long depth, Left left, const float* right, long right_stride, float* to,
                            long to_stride, bool accumulate, const void* ahead = nullptr, long lines = 0) {
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const long each = (lines + tiles * depth - 1) / (tiles * depth);
    for (long tile = 0, row = 0, count; tile < tiles; ++tile, row += count) {
        count = (rows - row + tiles - tile - 1) / (tiles - tile);  // evenly: 8 rows are 4 and 4
        const Left from{left.begin + row * left.row_stride, left.row_stride, left.depth_stride};
        const long before = tile * depth * each;
        multiply_rows<VECTORS>(count, from, right, right_stride, to + row * to_stride, to_stride, depth, accumulate,
                               {static_cast<const char*>(ahead) + before * 64, before < lines ? each : 0});
    }
}
