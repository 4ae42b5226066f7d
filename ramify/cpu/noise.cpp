// The noise of draws: Philox4x32-10 keyed by seed, child, position and level, made into Gumbel numbers. The words are
// those of sampling/draw.py, and so are the numbers, up to the last bit of a logarithm in float64.
#include <cmath>
#include <cstdint>

#include "threads.h"

namespace {

constexpr int ROUNDS = 10;
constexpr uint64_t MULTIPLIERS[] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t WEYL[] = {0x9E3779B9, 0xBB67AE85};
constexpr double WORD_STEP = 1.0 / 4294967296.0;  // from one word to the next, where words are spread over 0 .. 1

struct Words {
    uint32_t word[4];
};

Words philox(Words counter, uint32_t key0, uint32_t key1) {
    uint32_t* c = counter.word;
    for (int round = 0; round < ROUNDS; ++round) {
        const uint64_t product0 = c[0] * MULTIPLIERS[0], product1 = c[2] * MULTIPLIERS[1];
        const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
        const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
        c[0] = next0, c[1] = static_cast<uint32_t>(product1);
        c[2] = next2, c[3] = static_cast<uint32_t>(product0);
        key0 += WEYL[0], key1 += WEYL[1];
    }
    return counter;
}

// float64 keeps the rare large values exact: they decide the race.
float gumbel_of(uint32_t word) {
    const double uniform = (word + 0.5) * WORD_STEP;
    return static_cast<float>(-std::log(-std::log(1.0 - uniform)));
}

}  // namespace

// seed_low, seed_high, child, position, first (rows) -> out (rows, count): noise for ids first .. first + count, where
// first is a multiple of 4. Id i takes word i % 4 of the counter i / 4.
extern "C" void gumbel(const int64_t* seed_low, const int64_t* seed_high, const int64_t* child, const int64_t* position,
                       const int64_t* first, long level, float* out, long rows, long count, long threads) {
    for_each_chunk(rows, threads, [&](long row, long) {
        for (long id = 0; id < count; id += 4) {
            const Words counter{{static_cast<uint32_t>((first[row] + id) / 4), static_cast<uint32_t>(position[row]),
                                 static_cast<uint32_t>(child[row]), static_cast<uint32_t>(level)}};
            const Words words =
                philox(counter, static_cast<uint32_t>(seed_low[row]), static_cast<uint32_t>(seed_high[row]));
            for (long i = 0; i < 4 && id + i < count; ++i) out[row * count + id + i] = gumbel_of(words.word[i]);
        }
    });
}
