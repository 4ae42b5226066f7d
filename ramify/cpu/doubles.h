// Vectors in float64, and an exponential of them.
#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

// A vector in float64: two of the machine's own. Of AVX-512 only what every processor with any of it has.
struct Doubles {
    typedef double Half __attribute__((vector_size(WIDTH * 4)));
    typedef float Narrow __attribute__((vector_size(WIDTH * 2)));
    Half low, high;

#if defined(__AVX512F__)
    static Doubles of(Vector values) {
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)values, 1));
        return {(Half)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)values)), (Half)_mm512_cvtps_pd(upper)};
    }
    Vector narrowed() const {
        const __m512 lower = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low));
        const __m256d upper = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)high));
        return (Vector)_mm512_insertf64x4((__m512d)lower, upper, 1);
    }
#elif defined(__AVX__)
    static Doubles of(Vector values) {
        const __m128 upper = _mm256_extractf128_ps((__m256)values, 1);
        return {(Half)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)values)), (Half)_mm256_cvtps_pd(upper)};
    }
    Vector narrowed() const {
        const __m256 lower = _mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)low));
        return (Vector)_mm256_insertf128_ps(lower, _mm256_cvtpd_ps((__m256d)high), 1);
    }
#else
    static Doubles of(Vector values) {
        Narrow halves[2];
        memcpy(halves, &values, sizeof(values));
        return {__builtin_convertvector(halves[0], Half), __builtin_convertvector(halves[1], Half)};
    }
    Vector narrowed() const {
        const Narrow halves[2] = {__builtin_convertvector(low, Narrow), __builtin_convertvector(high, Narrow)};
        Vector values;
        memcpy(&values, halves, sizeof(values));
        return values;
    }
#endif
};
static inline Doubles operator+(Doubles one, Doubles two) { return {one.low + two.low, one.high + two.high}; }
static inline Doubles operator-(Doubles one, Doubles two) { return {one.low - two.low, one.high - two.high}; }
static inline Doubles operator-(Doubles one, double two) { return {one.low - two, one.high - two}; }
static inline Doubles operator*(double factor, Doubles one) { return {factor * one.low, factor * one.high}; }
static inline Doubles operator*(Doubles one, Doubles two) { return {one.low * two.low, one.high * two.high}; }
static inline Doubles larger(Doubles one, Doubles two) {
    return {one.low > two.low ? one.low : two.low, one.high > two.high ? one.high : two.high};
}

static inline double largest(const Doubles& values) {
    double most = values.low[0];
    for (long lane = 0; lane < WIDTH / 2; ++lane) most = std::max({most, values.low[lane], values.high[lane]});
    return most;
}

static inline double sum(const Doubles& values) {
    const Doubles::Half both = values.low + values.high;
    double total = 0;
    for (long lane = 0; lane < WIDTH / 2; ++lane) total += both[lane];
    return total;
}

// e^x; 0 where that is below the smallest normal number. For x below 700.
static inline Doubles::Half exponential(Doubles::Half x) {
    typedef uint64_t Longs __attribute__((vector_size(WIDTH * 4)));
    const double rounding = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest integer in the lowest bits
    const Doubles::Half power = x * 1.4426950408889634, shifted = power + rounding, whole = shifted - rounding;
    // ln 2 in two parts, of which the first times an integer is exact.
    const Doubles::Half rest = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
    Doubles::Half value = rest * (1 / 6227020800.0) + 1 / 479001600.0;  // the series up to the 13th degree
    for (const double inverse : {1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0, 1 / 5040.0, 1 / 720.0,
                                 1 / 120.0, 1 / 24.0, 1 / 6.0, 0.5, 1.0, 1.0})
        value = value * rest + inverse;
    value *= (Doubles::Half)(((Longs)shifted << 52) + 0x3ff0000000000000);  // the integer as an exponent
    return x < -708.0 ? Doubles::Half{} : value;
}
static inline Doubles exponential(const Doubles& x) { return {exponential(x.low), exponential(x.high)}; }
