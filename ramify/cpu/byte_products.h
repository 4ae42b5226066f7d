// Sums of four products of bytes in every lane: weights of packed panels times integers of x.
#pragma once

#include "formats.h"

static inline Integers broadcast_integer(int32_t value) { return value - Integers{}; }

#if defined(__AVX512VNNI__) || (!defined(__AVX512F__) && defined(__AVXVNNI__))
#define RAMIFY_PAIRS 0  // one instruction does it

template <int BITS>
static inline Integers add_products(Integers sum, Integers weights, Integers numbers) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)numbers);
#else
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)numbers);
#endif
}

#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define RAMIFY_PAIRS 1  // sums of two products in 16 bits, some of which are added up before they become 32

// How many fit without saturating: with four bits 8 x 2 x 15 x 128 = 30,720, with five 4 x 2 x 31 x 128 = 31,744, with
// six 2 x 2 x 63 x 128 = 32,256; with eight 2 x 128 x 127 = 32,512, so that numbers of x must be above -128 there.
template <int BITS>
constexpr int STEPS_IN_16_BITS = BITS == 4   ? 8
                                 : BITS == 5 ? 4
                                 : BITS == 6 ? 2
                                             : 1;

// Of signed weights the magnitudes, and of x what their signs make of it: the first must be unsigned.
template <int BITS>
static inline Integers pairs(Integers weights, Integers numbers) {
#if defined(__AVX512BW__)
    if constexpr (BITS == 8) {
        const __mmask64 negative = _mm512_movepi8_mask((__m512i)weights);
        const __m512i same = _mm512_mask_sub_epi8((__m512i)numbers, negative, __m512i{}, (__m512i)numbers);
        return (Integers)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)weights), same);
    }
    return (Integers)_mm512_maddubs_epi16((__m512i)weights, (__m512i)numbers);
#else
    if constexpr (BITS == 8) {
        const __m256i same = _mm256_sign_epi8((__m256i)numbers, (__m256i)weights);
        return (Integers)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), same);
    }
    return (Integers)_mm256_maddubs_epi16((__m256i)weights, (__m256i)numbers);
#endif
}

typedef int16_t Shorts __attribute__((vector_size(WIDTH * 4)));

static inline Integers add_pairs(Integers sum, Shorts pairs) {
#if defined(__AVX512BW__)
    return sum + (Integers)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
    return sum + (Integers)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}

#else
#define RAMIFY_PAIRS 0

template <int BITS>
static inline Integers add_products(Integers sum, Integers weights, Integers numbers) {
    for (int byte = 0; byte < 4; ++byte) {
        const Integers top = weights << (24 - 8 * byte), number = (numbers << (24 - 8 * byte)) >> 24;
        sum += (BITS == 8 ? top >> 24 : (weights >> (8 * byte)) & 127) * number;
    }
    return sum;
}

#endif

// sums += the products of STEPS vectors of weights, for each sum, with what `numbers(step)` gives.
template <int BITS, long STEPS, int SUMS, class Numbers>
static inline void add_all_products(Integers* sums, const Integers (*weights)[STEPS], Numbers numbers) {
#if RAMIFY_PAIRS
    constexpr long AT_ONCE = STEPS_IN_16_BITS<BITS> < STEPS ? STEPS_IN_16_BITS<BITS> : STEPS;
#pragma GCC unroll 8
    for (long group = 0; group < STEPS; group += AT_ONCE) {
        Shorts added[SUMS];
#pragma GCC unroll 8
        for (long step = group; step < group + AT_ONCE; ++step) {
            const Integers four = numbers(step);
#pragma GCC unroll 4
            for (int sum = 0; sum < SUMS; ++sum) {
                const Shorts made = (Shorts)pairs<BITS>(weights[sum][step], four);
                added[sum] = step == group ? made : added[sum] + made;
            }
        }
#pragma GCC unroll 4
        for (int sum = 0; sum < SUMS; ++sum) sums[sum] = add_pairs(sums[sum], added[sum]);
    }
#else
#pragma GCC unroll 8
    for (long step = 0; step < STEPS; ++step) {
        const Integers four = numbers(step);
#pragma GCC unroll 4
        for (int sum = 0; sum < SUMS; ++sum) sums[sum] = add_products<BITS>(sums[sum], weights[sum][step], four);
    }
#endif
}
