// The number formats of weights: how blocks of a checkpoint are laid out in panels, and how panels become numbers
// again.
//
// A panel holds TILE_COLUMNS outputs of a weight. It is a run of units, one after the other along the depth; a unit
// holds some weights of every column, and what turns them into numbers. A format is a struct with
//
//     UNIT, UNIT_BYTES              weights of a column in a unit, bytes of a whole unit of a panel
//     RUN                           weights of a column that share a Scale
//     IN_TWO_WORDS                  whether a weight's bits lie in two places: unpacking it takes more registers
//     BLOCK_BYTES                   bytes of UNIT weights in a checkpoint
//     put(block, unit, column)      packs one column's weights; the unit was zeroed before
//     Scale, scale(unit, run, part) of a vector of columns; `part` counts the vectors of a tile
//     Eight, eight(unit, k, part)   weights k .. k + 7 (k a multiple of 8), as they lie in memory
//     weight(eight, i, scale)       one of those, as a vector of numbers
//     HOLDS_INTEGERS                whether it multiplies integers too (int8_tiles.h), and then
//     NUMBER_BITS, KINDS            bits of an integer; 2 where a Scale has a minimum, else 1
//     unit_scale(unit, part)        the part of a Scale that all runs of a unit share
//     HAS_FACTORS, factors(…)       whether each run has factors for it, and those: integers, as a Scale
//     OFFSET, bytes(eight, odd)     a lane's four weights at even places, or at odd ones, as bytes, OFFSET larger
//
// or, where weights are numbers already, with units of one weight and weight(unit, part) alone.
//
// Every number is the dequantised weight bit for bit: the integers and scales of all formats are so short that their
// products are exact, and a minimum is added with one rounding, fused or not.
#pragma once

#include <cstring>

#include "vectors.h"

// Whether products of integers take weights as bytes from 0 to 255; else those of eight bits are -128 to 127.
#if defined(__AVX512VNNI__) || (!defined(__AVX512F__) && defined(__AVXVNNI__))
constexpr bool UNSIGNED_BYTES = true;
#else
constexpr bool UNSIGNED_BYTES = false;
#endif

// A vector of small integers from memory. GCC's own conversion of bytes goes through several shuffles.
template <class Number>
static inline Integers load_integers(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Number) == 1) {
        static_assert(Number(-1) < 0);
        return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(Number) == 1) {
        static_assert(Number(-1) < 0);
        return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
#endif
    typedef Number Small __attribute__((vector_size(WIDTH * sizeof(Number))));
    Small values;
    memcpy(&values, from, sizeof(values));
    return __builtin_convertvector(values, Integers);
}

// A vector of float16 from memory.
static inline Vector load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX__) && defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    const Integers bits = load_integers<uint16_t>(from);
    const Vector finite = (Vector)((bits & 0x7fff) << 13) * 0x1p112f;  // the exponent's other bias; exact
    const Integers special = (bits & 0x7c00) == 0x7c00;                // infinities and NaN
    return (Vector)((Integers)finite | (special & 0x7f800000) | ((bits & 0x8000) << 16));
#endif
}

// Positive shifts left, negative right; bits that enter do not matter.
static inline Integers shifted(Integers bits, int left) { return left >= 0 ? bits << left : bits >> -left; }

// The bits of `one` where the mask has ones, and those of `other`.
static inline Integers selected(int32_t mask, Integers one, Integers other) {
#if defined(__AVX512F__)
    return (Integers)_mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), (__m512i)one, (__m512i)other, 0xca);
#else
    return (one & mask) | (other & ~mask);
#endif
}

// The lowest four bits of eight bytes, close together.
static inline uint32_t low_bits(const int8_t* bytes) {
    uint64_t bits;
    memcpy(&bits, bytes, 8);
    bits &= 0x0f0f0f0f0f0f0f0f;
    bits = (bits | bits >> 4) & 0x00ff00ff00ff00ff;
    bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
    return static_cast<uint32_t>(bits | bits >> 16);
}

// The next COUNT bits of eight bytes: of two neighbours side by side in a byte of the result.
template <int COUNT>
static inline uint32_t upper_bits(const int8_t* bytes) {
    uint64_t bits;
    memcpy(&bits, bytes, 8);
    bits = bits >> 4 & 0x0101010101010101 * ((1 << COUNT) - 1);
    bits = (bits | bits >> (8 - COUNT)) & 0x00ff00ff00ff00ff;
    bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
    return static_cast<uint32_t>(bits | bits >> 16);
}

// -- weights that are numbers already -------------------------------------------------------------------------

template <long BYTES>
struct Numbers {
    static constexpr long UNIT = 1, RUN = 1, BLOCK_BYTES = BYTES, UNIT_BYTES = BYTES * TILE_COLUMNS;
    static constexpr bool IN_TWO_WORDS = false, HOLDS_INTEGERS = false;
    static void put(const uint8_t* block, uint8_t* unit, long column) { memcpy(unit + column * BYTES, block, BYTES); }
};

struct Float32 : Numbers<4> {
    static inline Vector weight(const uint8_t* unit, long part) {
        return load(reinterpret_cast<const float*>(unit) + part * WIDTH);
    }
};

struct Float16 : Numbers<2> {
    static inline Vector weight(const uint8_t* unit, long part) { return load_halves(unit + 2 * part * WIDTH); }
};

struct BFloat16 : Numbers<2> {
    static inline Vector weight(const uint8_t* unit, long part) {
        return (Vector)(load_integers<uint16_t>(unit + 2 * part * WIDTH) << 16);
    }
};

// -- integers of a few bits, and scales -----------------------------------------------------------------------

// One column's weights as a checkpoint's block says them, on their way into a panel.
struct Block {
    uint16_t scale, minimum;        // float16
    int8_t scales[16], minima[16];  // factors of the two, one for each run
    int8_t numbers[256];
};

// A weight is number * scale, or number * scale + minimum. With RUNS > 1 a unit has that many runs, each with an
// integer factor for the scale and one for the minimum, which is then subtracted.
//
// In a unit: scales (float16, by column), minima (float16), the runs' factors of scales (bytes, by run, then column),
// of minima, and then for every 32 weights of the columns
//
//     8 bits         words of 4 weights, by weight / 8, then whether those at even places or at odd ones, then column
//     4, 5, 6 bits   words of 8 weights' low four bits, by weight / 8, then column; words of all 32 fifth bits, or
//                    of 16 weights' upper two bits: those of weights 0 and 1 lie in the first byte, of 2 and 3 in the
//                    second, and so on; those of the next eight weights beside them
template <int BITS, bool IS_SIGNED, bool HAS_MINIMUM, long RUNS = 1>
struct Quantised {
    static constexpr long UNIT = RUNS > 1 ? 256 : 32, RUN = UNIT / RUNS, KINDS = HAS_MINIMUM ? 2 : 1;
    static constexpr long FACTORS = 2 * KINDS * TILE_COLUMNS;  // where the runs' factors begin
    static constexpr long NUMBERS = FACTORS + (RUNS > 1 ? RUNS * KINDS * TILE_COLUMNS : 0);
    static constexpr long LOW_BYTES = BITS == 8 ? 32 : 16, GROUP_BYTES = 4 * BITS * TILE_COLUMNS;  // of 32 weights
    static constexpr long UNIT_BYTES = NUMBERS + UNIT / 32 * GROUP_BYTES;
    static constexpr bool IN_TWO_WORDS = BITS == 5 || BITS == 6, HOLDS_INTEGERS = true, HAS_FACTORS = RUNS > 1;
    static constexpr int NUMBER_BITS = BITS;
    static constexpr int UPPER = BITS - 4;                 // bits that are not with the lowest four
    static constexpr long SHARING = UPPER == 1 ? 32 : 16;  // weights that share a word of those

    // Where the upper bits of the i-th of eight weights lie.
    static constexpr int upper_at(int i) { return i / 2 * 8 + i % 2 * UPPER; }

    struct Scale {
        Vector scale, minimum;
    };

    struct Eight {
        // Of 8 bits: the weights at even places, and those at odd ones. Of fewer: their lowest four bits, and the
        // others, shifted so that the first weight's are the lowest.
        Integers low, upper;
    };

    // What all runs of a unit share; a run's own factors, by which these are multiplied.
    static inline Scale unit_scale(const uint8_t* unit, long part) {
        const long column = part * WIDTH;
        Scale found{load_halves(unit + 2 * column), Vector{}};
        if constexpr (HAS_MINIMUM) found.minimum = load_halves(unit + 2 * (TILE_COLUMNS + column));
        if constexpr (HAS_MINIMUM && RUNS > 1) found.minimum = -found.minimum;
        return found;
    }

    static inline Scale factors(const uint8_t* unit, long run, long part) {
        Scale found{};
        if constexpr (RUNS > 1) {
            const uint8_t* factors = unit + FACTORS + run * TILE_COLUMNS + part * WIDTH;
            found.scale = __builtin_convertvector(load_integers<int8_t>(factors), Vector);
            factors += RUNS * TILE_COLUMNS;
            if constexpr (HAS_MINIMUM) found.minimum = __builtin_convertvector(load_integers<int8_t>(factors), Vector);
        }
        return found;
    }

    static inline Scale scale(const uint8_t* unit, long run, long part) {
        Scale found = unit_scale(unit, part);
        if constexpr (RUNS > 1) {
            const Scale own = factors(unit, run, part);
            found.scale *= own.scale;
            if constexpr (HAS_MINIMUM) found.minimum *= own.minimum;
        }
        return found;
    }

    static inline Eight eight(const uint8_t* unit, long k, long part) {
        const uint8_t* group = unit + NUMBERS + k / 32 * GROUP_BYTES;
        const long inside = k % 32, column = part * WIDTH;
        Eight found{};
        if constexpr (BITS == 8) {
            found.low = load_integers<int32_t>(group + (inside * TILE_COLUMNS) + column * 4);
            found.upper = load_integers<int32_t>(group + ((inside + 4) * TILE_COLUMNS) + column * 4);
        } else {
            found.low = load_integers<int32_t>(group + (inside / 8 * TILE_COLUMNS + column) * 4);
            const uint8_t* upper = group + LOW_BYTES * TILE_COLUMNS + column * 4;
            if constexpr (UPPER > 0) {
                upper += inside / SHARING * TILE_COLUMNS * 4;
                found.upper = load_integers<int32_t>(upper) >> static_cast<int>(inside % SHARING / 8 * 2 * UPPER);
            }
        }
        return found;
    }

    static inline Vector number(const Eight& eight, int i) {
        if constexpr (BITS == 8) {
            return __builtin_convertvector(((i % 2 ? eight.upper : eight.low) << (24 - i / 2 * 8)) >> 24, Vector);
        } else if constexpr (BITS == 4 && WIDTH == 16) {  // the lowest four bits choose from a table
            Vector table{};
            for (int lane = 0; lane < WIDTH; ++lane) table[lane] = IS_SIGNED && lane > 7 ? lane - 16 : lane;
            return __builtin_shuffle(table, eight.low >> (4 * i));
        } else if constexpr (BITS == 5 && WIDTH == 16) {  // the lowest five bits choose from two
            Vector first{}, second{};
            for (int lane = 0; lane < WIDTH; ++lane)
                first[lane] = lane, second[lane] = IS_SIGNED ? lane - 16 : lane + 16;
            return __builtin_shuffle(first, second,
                                     selected(15, eight.low >> (4 * i), shifted(eight.upper, 4 - upper_at(i))));
        } else {
            // The number's bits to the top of the word, upper ones from one word and lower ones from the other; then
            // down again, which drops what lies below and spreads the sign.
            Integers top = shifted(eight.low, 32 - BITS - 4 * i);
            if constexpr (UPPER > 0) {
                constexpr int32_t MASK = static_cast<int32_t>(~0u << (32 - UPPER));
                top = selected(MASK, shifted(eight.upper, 32 - UPPER - upper_at(i)), top);
            }
            if constexpr (IS_SIGNED) return __builtin_convertvector(top >> (32 - BITS), Vector);
            typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
            return __builtin_convertvector((Integers)((Bits)top >> (32 - BITS)), Vector);
        }
    }

    static inline Vector weight(const Eight& eight, int i, const Scale& scale) {
        if constexpr (HAS_MINIMUM) return number(eight, i) * scale.scale + scale.minimum;
        return number(eight, i) * scale.scale;
    }

    static constexpr int OFFSET = !IS_SIGNED || (BITS == 8 && !UNSIGNED_BYTES) ? 0 : 1 << (BITS - 1);

    static inline Integers bytes(const Eight& eight, int odd) {
        Integers four{};
        if constexpr (BITS == 8) {
            four = odd ? eight.upper : eight.low;
        } else {
            four = (eight.low >> (4 * odd)) & 0x0f0f0f0f;
            if constexpr (UPPER > 0)
                four |= shifted(eight.upper, 4 - UPPER * odd) & static_cast<int32_t>(((1 << UPPER) - 1) * 0x10101010u);
        }
        if constexpr (OFFSET) four ^= static_cast<int32_t>(OFFSET * 0x01010101u);
        return four;
    }

    static void put_block(const Block& block, uint8_t* unit, long column) {
        memcpy(unit + 2 * column, &block.scale, 2);
        if (HAS_MINIMUM) memcpy(unit + 2 * (TILE_COLUMNS + column), &block.minimum, 2);
        if (RUNS > 1)
            for (long run = 0; run < RUNS; ++run) {
                unit[FACTORS + run * TILE_COLUMNS + column] = block.scales[run];
                if (HAS_MINIMUM) unit[FACTORS + (RUNS + run) * TILE_COLUMNS + column] = block.minima[run];
            }
        for (long first = 0; first < UNIT; first += 32)
            put_numbers(block.numbers + first, unit + NUMBERS + first / 32 * GROUP_BYTES, column);
    }

    // One column's 32 numbers into their group.
    static void put_numbers(const int8_t* numbers, uint8_t* group, long column) {
        if constexpr (BITS == 8) {
            for (long k = 0; k < 32; ++k)
                group[(k / 8 * 2 + k % 2) * 4 * TILE_COLUMNS + column * 4 + k % 8 / 2] = numbers[k];
        } else {
            uint32_t upper[2] = {};
            for (long k = 0; k < 32; k += 8) {
                const uint32_t low = low_bits(numbers + k);
                memcpy(group + (k / 8 * TILE_COLUMNS + column) * 4, &low, 4);
                if constexpr (UPPER > 0)
                    upper[k / SHARING] |= upper_bits<UPPER>(numbers + k) << (k % SHARING / 8 * 2 * UPPER);
            }
            for (long word = 0; word < UPPER; ++word)
                memcpy(group + (LOW_BYTES + 4 * word) * TILE_COLUMNS + column * 4, &upper[word], 4);
        }
    }
};

// Low nibbles are the first 16 numbers, high ones the rest.
static inline void read_nibbles(const uint8_t* from, int8_t* numbers) {
    for (long i = 0; i < 16; ++i) {
        numbers[i] = from[i] & 15;
        numbers[16 + i] = from[i] >> 4;
    }
}

static inline void add_fifth_bits(const uint8_t* from, int8_t* numbers) {
    for (long i = 0; i < 32; ++i) numbers[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

static inline void subtract(int8_t offset, long count, int8_t* numbers) {
    for (long i = 0; i < count; ++i) numbers[i] -= offset;
}

struct Q8_0 : Quantised<8, true, false> {  // scale | 32 bytes
    static constexpr long BLOCK_BYTES = 34;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        memcpy(block.numbers, from + 2, 32);
        put_block(block, unit, column);
    }
};

struct Q4_0 : Quantised<4, true, false> {  // scale | 16 bytes of nibbles, offset by 8
    static constexpr long BLOCK_BYTES = 18;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        read_nibbles(from + 2, block.numbers);
        subtract(8, 32, block.numbers);
        put_block(block, unit, column);
    }
};

struct Q4_1 : Quantised<4, false, true> {  // scale | minimum | 16 bytes of nibbles
    static constexpr long BLOCK_BYTES = 20;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        memcpy(&block.minimum, from + 2, 2);
        read_nibbles(from + 4, block.numbers);
        put_block(block, unit, column);
    }
};

struct Q5_0 : Quantised<5, true, false> {  // scale | 32 fifth bits | 16 bytes of nibbles, offset by 16
    static constexpr long BLOCK_BYTES = 22;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        read_nibbles(from + 6, block.numbers);
        add_fifth_bits(from + 2, block.numbers);
        subtract(16, 32, block.numbers);
        put_block(block, unit, column);
    }
};

struct Q5_1 : Quantised<5, false, true> {  // scale | minimum | 32 fifth bits | 16 bytes of nibbles
    static constexpr long BLOCK_BYTES = 24;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        memcpy(&block.minimum, from + 2, 2);
        read_nibbles(from + 8, block.numbers);
        add_fifth_bits(from + 4, block.numbers);
        put_block(block, unit, column);
    }
};

// The factors of 8 runs, six bits each, for the scale and for the minimum, in 12 bytes.
static inline void read_six_bit_factors(const uint8_t* from, Block& block) {
    for (long run = 0; run < 4; ++run) {
        block.scales[run] = from[run] & 63;
        block.minima[run] = from[4 + run] & 63;
        block.scales[4 + run] = (from[8 + run] & 15) | (from[run] >> 2 & 48);
        block.minima[4 + run] = from[8 + run] >> 4 | (from[4 + run] >> 2 & 48);
    }
}

// 4 x 32 bytes: low nibbles are 32 numbers, high ones the next 32.
static inline void read_nibbles_by_64(const uint8_t* from, int8_t* numbers) {
    for (long first = 0; first < 256; first += 64, from += 32)
        for (long i = 0; i < 32; ++i) {
            numbers[first + i] = from[i] & 15;
            numbers[first + 32 + i] = from[i] >> 4;
        }
}

struct Q4_K : Quantised<4, false, true, 8> {  // scale | scale of minima | 12 bytes of factors | 128 of nibbles
    static constexpr long BLOCK_BYTES = 144;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        memcpy(&block.minimum, from + 2, 2);
        read_six_bit_factors(from + 4, block);
        read_nibbles_by_64(from + 16, block.numbers);
        put_block(block, unit, column);
    }
};

struct Q5_K : Quantised<5, false, true, 8> {  // as Q4_K, with 32 bytes of fifth bits before the nibbles
    static constexpr long BLOCK_BYTES = 176;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from, 2);
        memcpy(&block.minimum, from + 2, 2);
        read_six_bit_factors(from + 4, block);
        read_nibbles_by_64(from + 48, block.numbers);
        for (long run = 0; run < 8; ++run)
            for (long i = 0; i < 32; ++i) block.numbers[run * 32 + i] |= (from[16 + i] >> run & 1) << 4;
        put_block(block, unit, column);
    }
};

struct Q6_K : Quantised<6, true, false, 16> {  // 128 bytes of nibbles | 64 of upper bits | 16 factors | scale; by 32
    static constexpr long BLOCK_BYTES = 210;
    static void put(const uint8_t* from, uint8_t* unit, long column) {
        Block block;
        memcpy(&block.scale, from + 208, 2);
        memcpy(block.scales, from + 192, 16);
        for (long half = 0; half < 2; ++half) {
            const uint8_t *low = from + half * 64, *upper = from + 128 + half * 32;
            int8_t* numbers = block.numbers + half * 128;
            for (long i = 0; i < 32; ++i) {
                numbers[i] = (low[i] & 15) | (upper[i] & 3) << 4;
                numbers[32 + i] = (low[32 + i] & 15) | (upper[i] >> 2 & 3) << 4;
                numbers[64 + i] = low[i] >> 4 | (upper[i] >> 4 & 3) << 4;
                numbers[96 + i] = low[32 + i] >> 4 | (upper[i] >> 6) << 4;
            }
        }
        subtract(32, 256, block.numbers);
        put_block(block, unit, column);
    }
};

// -- weights of GPTQ, AWQ and FP8 checkpoints -----------------------------------------------------------------

// (number - zero) * scale, as number * scale - zero * scale: both are exact, and so is what is left of them. In a unit:
// scales (float16, by column), numbers as in Quantised, zeros (bytes, by column). Of 8 bits, numbers and zeros are both
// held less 128.
template <int BITS, long WEIGHTS>
struct Grouped {
    using Numbers = Quantised<BITS, BITS == 8, false>;
    using Scale = typename Numbers::Scale;
    using Eight = typename Numbers::Eight;
    static constexpr long UNIT = WEIGHTS, RUN = WEIGHTS, BLOCK_BYTES = 4 + WEIGHTS * BITS / 8;
    static constexpr long ZEROS = Numbers::NUMBERS + UNIT / 32 * Numbers::GROUP_BYTES;
    static constexpr long UNIT_BYTES = ZEROS + TILE_COLUMNS, KINDS = 2;
    static constexpr bool IN_TWO_WORDS = false, HOLDS_INTEGERS = true, HAS_FACTORS = false;
    static constexpr int NUMBER_BITS = BITS, OFFSET = Numbers::OFFSET;

    static inline Scale scale(const uint8_t* unit, long, long part) { return unit_scale(unit, part); }

    static inline Scale unit_scale(const uint8_t* unit, long part) {
        const Vector scale = load_halves(unit + 2 * part * WIDTH);
        const Integers zero = load_integers<int8_t>(unit + ZEROS + part * WIDTH);
        return {scale, -(scale * __builtin_convertvector(zero, Vector))};
    }

    static inline Eight eight(const uint8_t* unit, long k, long part) { return Numbers::eight(unit, k, part); }

    static inline Integers bytes(const Eight& eight, int odd) { return Numbers::bytes(eight, odd); }

    static inline Vector weight(const Eight& eight, int i, const Scale& scale) {
        return Numbers::number(eight, i) * scale.scale + scale.minimum;
    }

    static void put(const uint8_t* from, uint8_t* unit, long column) {  // scale | zero | nothing | numbers
        constexpr int8_t OFFSET = BITS == 8 ? -128 : 0;
        unit[ZEROS + column] = from[2] + OFFSET;
        memcpy(unit + 2 * column, from, 2);
        for (long first = 0; first < UNIT; first += 32) {
            const uint8_t* packed = from + 4 + first * BITS / 8;
            int8_t numbers[32];
            if constexpr (BITS == 8) {
                for (long i = 0; i < 32; ++i) numbers[i] = packed[i] + OFFSET;
            } else {
                read_nibbles(packed, numbers);
            }
            Numbers::put_numbers(numbers, unit + Numbers::NUMBERS + first / 32 * Numbers::GROUP_BYTES, column);
        }
    }
};

// number * scale, rounded once. In a unit: scales (float32, by column), then bytes, by weight, then column. A byte
// (e4m3: sign, 4 bits of exponent, 3 of fraction) is a float16 with its bits moved, less 8 in the exponent, its
// subnormals too.
struct Fp8 {
    static constexpr long UNIT = 128, RUN = 128, BLOCK_BYTES = 4 + UNIT, NUMBERS = 4 * TILE_COLUMNS;
    static constexpr long UNIT_BYTES = NUMBERS + UNIT * TILE_COLUMNS;
    static constexpr bool IN_TWO_WORDS = false, HOLDS_INTEGERS = false;

    struct Scale {
        Vector scale;
    };

    struct Eight {
        const uint8_t* bytes;
    };

    static inline Scale scale(const uint8_t* unit, long, long part) {
        return {load(reinterpret_cast<const float*>(unit) + part * WIDTH)};
    }

    static inline Eight eight(const uint8_t* unit, long k, long part) {
        return {unit + NUMBERS + k * TILE_COLUMNS + part * WIDTH};
    }

    static inline Vector weight(const Eight& eight, int i, const Scale& scale) {
        const Integers bits = load_integers<int8_t>(eight.bytes + i * TILE_COLUMNS);
        typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
        const Halves halves = __builtin_convertvector((bits & 0x7f) << 7 | (bits & 0x80) << 8, Halves);
        uint8_t memory[sizeof(halves)];
        memcpy(memory, &halves, sizeof(halves));
        return load_halves(memory) * 256.0f * scale.scale;
    }

    static void put(const uint8_t* from, uint8_t* unit, long column) {
        memcpy(unit + 4 * column, from, 4);
        for (long k = 0; k < UNIT; ++k) unit[NUMBERS + k * TILE_COLUMNS + column] = from[4 + k];
    }
};

// Calls act(Format{}) with the format of GGML's number for it, or of ours (models/number_formats.py).
template <class Act>
static inline auto with_format(long type, Act act) {
    switch (type) {
        case 1:
            return act(Float16{});
        case 30:
            return act(BFloat16{});
        case 8:
            return act(Q8_0{});
        case 2:
            return act(Q4_0{});
        case 3:
            return act(Q4_1{});
        case 6:
            return act(Q5_0{});
        case 7:
            return act(Q5_1{});
        case 12:
            return act(Q4_K{});
        case 13:
            return act(Q5_K{});
        case 14:
            return act(Q6_K{});
        case 1128:
            return act(Grouped<4, 128>{});
        case 1032:
            return act(Grouped<4, 32>{});
        case 2128:
            return act(Grouped<8, 128>{});
        case 2032:
            return act(Grouped<8, 32>{});
        case 3128:
            return act(Fp8{});
        default:
            return act(Float32{});
    }
}
