// What the sampler asks of whole rows of logits: the log-sum-exp of every block, and the values that borders lie at.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr long BLOCK = 256;  // ids of the first level of a draw
constexpr long BUCKETS = 4096;
constexpr float REACH = 40.0f;  // how far below the largest key the buckets go; what is lower shares the last
constexpr float NEVER = -std::numeric_limits<float>::infinity();

float largest_of(const float* values, long count) {
    Vector most = broadcast(NEVER);
    for (long j = 0; j < count; j += WIDTH) {
        const Vector own = load_some(values + j, count - j, NEVER);
        most = own > most ? own : most;
    }
    return largest(most);
}

float log_sum(const float* logits, long count) {
    const float most = largest_of(logits, count);
    const float shift = most == NEVER ? 0.0f : most;  // of nothing but -inf and NaN, the sum tells which
    Vector total{};
    for (long j = 0; j < count; j += WIDTH) total += exponential(load_some(logits + j, count - j, NEVER) - shift);
    return most + std::log(sum(total));
}

// -- borders --

struct Member {
    float key, weight;
    bool operator<(const Member& other) const { return key > other.key; }  // the largest first
};

// Weights that are the same for all keys: their sum counts keys.
struct Ones {
    Vector operator()(long, long, Vector) const { return broadcast(1.0f); }
};

// The weight of a logit is its probability, but for a factor, where it reaches the least.
struct Likelihoods {
    float most, least;
    Vector operator()(long, long, Vector keys) const {
        const Vector weights = exponential(keys - most);
        return keys < least ? Vector{} : weights;
    }
};

struct Given {
    const float* weights;
    Vector operator()(long j, long left, Vector) const { return load_some(weights + j, left, 0.0f); }
};

// NaN shares the last bucket.
Integers buckets_of(Vector keys, float most) {
    const Vector scaled = (most - keys) * (BUCKETS / REACH);
    return nearest_integers(scaled < BUCKETS - 1.0f ? scaled : broadcast(BUCKETS - 1.0f));
}

// The largest of the keys such that it and all larger ones have the weight wanted(total); the smallest, should rounding
// leave less than that. Keys are put into buckets by size, and only the bucket in which that is reached is sorted.
template <class Weights, class Wanted>
float crossing(const float* keys, long count, float most, Weights weights_of, Wanted wanted_of) {
    double masses[BUCKETS] = {};
    for (long j = 0; j < count; j += WIDTH) {
        const long left = count - j;
        const Vector own = load_some(keys + j, left, NEVER), weights = weights_of(j, left, own);
        const Integers buckets = buckets_of(own, most);
        for (long lane = 0; lane < WIDTH && lane < left; ++lane) masses[buckets[lane]] += weights[lane];
    }
    double total = 0.0, before = 0.0;
    for (const double mass : masses) total += mass;
    const double wanted = wanted_of(total);
    if (!(wanted <= total)) return NEVER;  // weights that are no numbers have no border
    long bucket = 0;
    while (bucket < BUCKETS - 1 && before + masses[bucket] < wanted) before += masses[bucket++];

    std::vector<Member> members;
    for (long j = 0; j < count; j += WIDTH) {
        const long left = count - j;
        const Vector own = load_some(keys + j, left, NEVER);
        const Integers buckets = buckets_of(own, most), chosen = buckets == static_cast<int32_t>(bucket);
        if (!any(chosen)) continue;
        const Vector weights = weights_of(j, left, own);
        for (long lane = 0; lane < WIDTH && lane < left; ++lane)
            if (chosen[lane]) members.push_back({own[lane] == own[lane] ? own[lane] : NEVER, weights[lane]});
    }
    if (members.empty()) return NEVER;
    const auto [first, last] = std::minmax_element(members.begin(), members.end());
    if (first->key == last->key) return first->key;  // many ties are not worth being sorted
    std::sort(members.begin(), members.end());
    for (const Member& member : members)
        if ((before += member.weight) >= wanted) return member.key;
    return members.back().key;
}

float floor_of(const float* logits, long count, long top_k, double top_p) {
    const float most = largest_of(logits, count);
    float floor = NEVER;
    if (top_k < count) floor = crossing(logits, count, most, Ones{}, [&](double) { return top_k; });
    if (top_p < 1.0) {
        const Likelihoods likelihoods{most, floor};
        const float crossed = crossing(logits, count, most, likelihoods, [&](double total) { return top_p * total; });
        floor = crossed > floor ? crossed : floor;
    }
    return floor;
}

}  // namespace

// logits (rows, vocabulary), rows `stride` apart -> out (rows, blocks of 256 ids).
extern "C" void block_scores(const float* logits, long stride, float* out, long rows, long vocabulary, long threads) {
    const long blocks = (vocabulary + BLOCK - 1) / BLOCK;
    for_each_chunk(rows, threads, [&](long row, long) {
        const float* own = logits + row * stride;
        for (long block = 0; block < blocks; ++block) {
            const long first = block * BLOCK, left = vocabulary - first;
            out[row * blocks + block] = log_sum(own + first, left < BLOCK ? left : BLOCK);
        }
    });
}

// logits (rows, vocabulary), rows `stride` apart; top_k, top_p (rows) -> out (rows): the smallest logit that stays.
extern "C" void ranked_floors(const float* logits, long stride, const int64_t* top_k, const float* top_p, float* out,
                              long rows, long vocabulary, long threads) {
    for_each_chunk(rows, threads, [&](long row, long) {
        out[row] = floor_of(logits + row * stride, vocabulary, top_k[row], top_p[row]);
    });
}

// keys, weights (rows, count), share (rows) -> out (rows): the largest key such that it and all larger ones have that
// share of the row's weights.
extern "C" void crossings(const float* keys, const float* weights, const float* share, float* out, long rows,
                          long count, long threads) {
    for_each_chunk(rows, threads, [&](long row, long) {
        const float* own = keys + row * count;
        out[row] = crossing(own, count, largest_of(own, count), Given{weights + row * count},
                            [&](double total) { return static_cast<double>(share[row]) * total; });
    });
}
