// One row of two models' logits, theta and teacher, and the sums that their mixtures are made of; sampling/pair.py says
// why these. d is the log-ratio, log π_t − log π_θ.
//
// Sums go in float32 over a piece of the row, and on in float64. Those of exponents are relative to the largest so far.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "doubles.h"

constexpr long PIECE = 64 * WIDTH;  // ids: few enough that float32 adds them up to its last digits
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr float SMALL = 8.0f;  // while no d is larger, the difference of the normalisers is summed as one

// e^x − 1, x at most SMALL: near 0 by the first eight terms of its series, where the difference would lose its digits.
static inline Vector expm1(Vector x) {
    Vector near = x * (1 / 40320.0f);
    for (const float inverse : {1 / 5040.0f, 1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f})
        near = (near + inverse) * x;
    const Vector magnitude = (Vector)((Integers)x & 0x7fffffff);
    return magnitude < 0.5f ? near : exponential(x) - 1.0f;
}

// Of exponents x and numbers `ratio` beside them: Σ e, Σ e ratio, Σ e ratio², and the last two over ratio > 0 alone,
// all with e = e^(x − top).
struct Sums {
    double top = NOTHING, total = 0, mean = 0, square = 0, rise = 0, rise_square = 0;

    double log() const { return top + std::log(total); }

    void rise_to(double most) {
        if (!(most > top)) return;
        const double factor = std::exp(top - most);  // of nothing yet, 0
        top = most, total *= factor, mean *= factor, square *= factor, rise *= factor, rise_square *= factor;
    }
};

static inline Vector below(Vector x, double top) { return x - static_cast<float>(top); }
static inline Vector below(const Doubles& x, double top) { return (x - top).narrowed(); }

class PairRow {
  public:
    // What holds at any α.
    double whole_theta, whole_teacher;  // log Σ e of all that each allows
    double largest;                     // of theta
    double centre, rest;                // d = ratio − rest, ratio = teacher − theta − centre
    double span;                        // the largest |d|
    bool is_sound;                      // neither gave NaN or plus infinity; else nothing here means anything
    bool is_disjoint;                   // no token is allowed by both
    bool theta_alone, teacher_alone;    // one allows something that the other does not
    double value_at_0, slope_at_0, value_at_1, slope_at_1;  // of log Z

    static long scratch_size(long count) { return 2 * ((count + WIDTH - 1) / WIDTH * WIDTH); }  // numbers

    PairRow(const float* theta, const float* teacher, long count, float* scratch)
        : theta_(theta), teacher_(teacher), count_(count), base_(scratch), ratio_(scratch + scratch_size(count) / 2) {
        look_over();
        if (!is_sound) return;
        Sums theta_sums, teacher_sums;
        if (!is_disjoint) sum_both(theta_sums, teacher_sums);
        whole_theta = theta_alone || is_disjoint ? log_sum(theta_) : theta_sums.log();
        whole_teacher = teacher_alone || is_disjoint ? log_sum(teacher_) : teacher_sums.log();
        if (is_disjoint) return;
        find_centre(theta_sums);
        write_ratios();
        value_at_0 = theta_sums.log() - whole_theta, value_at_1 = teacher_sums.log() - whole_teacher;
        slope_at_0 = theta_sums.mean / theta_sums.total - centre - rest;
        slope_at_1 = teacher_sums.mean / teacher_sums.total - centre - rest;
    }

    bool supports_differ() const { return theta_alone || teacher_alone; }

    // Sums at any β, of exponents less theta's largest.
    template <bool WITH_MOMENTS>
    Sums at(double beta) const {
        const float factor = static_cast<float>(beta);
        return sums<Vector, WITH_MOMENTS>([&](long j) { return load(base_ + j) + factor * load(ratio_ + j); });
    }

    // log Z at that β, from these sums.
    double log_z(const Sums& sums, double beta) const { return sums.log() - (whole_theta - largest) - beta * rest; }

    // (1 − α) theta + α teacher, and minus infinity where either rules the token out. In float64: the two may be
    // hundreds, and their sum near nothing.
    Doubles exact(long j, double alpha) const {
        const Vector theta = at_theta(j), teacher = at_teacher(j);
        const Integers both = allowed(theta) & allowed(teacher);
        const Doubles of_theta = Doubles::of(both ? theta : Vector{}),
                      of_teacher = Doubles::of(both ? teacher : Vector{});
        return (1 - alpha) * of_theta + alpha * of_teacher + Doubles::of(both ? Vector{} : broadcast(NOTHING));
    }

    // Sums of these exponents as they are.
    template <bool WITH_MOMENTS>
    Sums exactly_at(double alpha) const {
        return sums<Doubles, WITH_MOMENTS>([&](long j) { return exact(j, alpha); });
    }

    // Sums of the exponents of `at` in float64 throughout, and log Σ e of all of theta, less its largest: a small
    // divergence needs their digits, and so does the difference of two sums where the models nearly agree.
    Sums finely_at(double beta) const {
        Doubles most = Doubles::of(broadcast(NOTHING)), total{}, mean{}, square{};
        const auto exponents = [&](long j) {
            return Doubles::of(load(base_ + j)) + beta * Doubles::of(load(ratio_ + j));
        };
        for (long j = 0; j < count_; j += WIDTH) most = larger(exponents(j), most);
        Sums found;
        found.top = ::largest(most);
        for (long j = 0; j < count_; j += WIDTH) {
            const Doubles e = exponential(exponents(j) - found.top), ratio = Doubles::of(load(ratio_ + j));
            total = total + e, mean = mean + e * ratio, square = square + e * ratio * ratio;
        }
        found.total = sum(total), found.mean = sum(mean), found.square = sum(square);
        return found;
    }
    double fine_log_sum_theta() const {
        Doubles total{};
        for (long j = 0; j < count_; j += WIDTH) total = total + exponential(Doubles::of(at_theta(j)) - largest);
        return std::log(sum(total));
    }

    // H(π_θ), H(π_t): log Σ e^x − E[x], x less its largest. The likeliest tokens, x = 0, are counted and not summed, so
    // that a model that is all but certain keeps its digits.
    double theta_entropy() const { return entropy(theta_, largest); }
    double teacher_entropy() const { return entropy(teacher_, largest_teacher_); }

  private:
    static Integers allowed(Vector logits) { return logits > NOTHING; }
    Vector at_theta(long j) const { return load_some(theta_ + j, count_ - j, NOTHING); }
    Vector at_teacher(long j) const { return load_some(teacher_ + j, count_ - j, NOTHING); }

    // Calls act(first, end) for every piece of the row.
    template <class Act>
    void for_pieces(Act act) const {
        for (long first = 0; first < count_; first += PIECE) act(first, std::min(first + PIECE, count_));
    }

    void look_over() {
        const Vector never = broadcast(NOTHING), always = -never;
        Vector most_theta = never, most_teacher = never, shared_theta = never, shared_teacher = never;
        Vector lowest = always, highest = never;
        Integers faults{}, only_theta{}, only_teacher{};
        for (long j = 0; j < count_; j += WIDTH) {
            const Vector theta = at_theta(j), teacher = at_teacher(j), d = teacher - theta;
            const Integers by_theta = allowed(theta), by_teacher = allowed(teacher), both = by_theta & by_teacher;
            faults |= ~((theta < always) & (teacher < always));
            only_theta |= by_theta & (teacher == never);
            only_teacher |= by_teacher & (theta == never);
            most_theta = larger(theta, most_theta), most_teacher = larger(teacher, most_teacher);
            shared_theta = larger(both ? theta : never, shared_theta);
            shared_teacher = larger(both ? teacher : never, shared_teacher);
            lowest = smaller(both ? d : always, lowest), highest = larger(both ? d : never, highest);
        }
        is_sound = !any(faults);
        theta_alone = any(only_theta), teacher_alone = any(only_teacher);
        largest = ::largest(most_theta), largest_teacher_ = ::largest(most_teacher);
        top_theta_ = ::largest(shared_theta), top_teacher_ = ::largest(shared_teacher);
        is_disjoint = top_theta_ == NOTHING;
        lowest_ = -::largest(-lowest), highest_ = ::largest(highest);
    }

    // Over what both allow; d is teacher − theta, as it is. Leaves theta's e in `base_`.
    void sum_both(Sums& theta_sums, Sums& teacher_sums) {
        theta_sums.top = top_theta_, teacher_sums.top = top_teacher_;
        for_pieces([&](long first, long end) {
            Vector total_theta{}, mean_theta{}, total_teacher{}, mean_teacher{};
            for (long j = first; j < end; j += WIDTH) {
                const Vector theta = at_theta(j), teacher = at_teacher(j);
                const Integers both = allowed(theta) & allowed(teacher);
                const Vector d = both ? teacher - theta : Vector{};
                const Vector of_theta = both ? exponential(theta - top_theta_) : Vector{};
                const Vector of_teacher = both ? exponential(teacher - top_teacher_) : Vector{};
                store(base_ + j, of_theta);
                total_theta += of_theta, mean_theta += of_theta * d;
                total_teacher += of_teacher, mean_teacher += of_teacher * d;
            }
            theta_sums.total += sum(total_theta), theta_sums.mean += sum(mean_theta);
            teacher_sums.total += sum(total_teacher), teacher_sums.mean += sum(mean_teacher);
        });
    }

    // Any number near the mean of d will do for the centre, less the difference of the normalisers. Where the models
    // nearly agree, that is log E_θ[e^ratio] and not two sums taken from each other: so α keeps its digits.
    void find_centre(const Sums& theta_sums) {
        centre = static_cast<float>(theta_sums.mean / theta_sums.total);
        rest = whole_teacher - whole_theta - centre;
        if (highest_ - centre < SMALL && !supports_differ()) {
            double growth = 0;
            for_pieces([&](long first, long end) {
                Vector grown{};
                for (long j = first; j < end; j += WIDTH) {
                    const Vector e = load(base_ + j);
                    grown += e > 0.0f ? e * expm1(ratio_of(at_theta(j), at_teacher(j))) : Vector{};
                }
                growth += sum(grown);
            });
            rest = std::log1p(growth / theta_sums.total);
        }
        const double most = static_cast<float>(rest);
        centre += most, rest -= most;
        span = std::max(centre - lowest_, highest_ - centre);
    }

    Vector ratio_of(Vector theta, Vector teacher) const {
        return (Doubles::of(teacher) - Doubles::of(theta) - centre).narrowed();
    }

    void write_ratios() {
        const float top = static_cast<float>(largest);
        for (long j = 0; j < count_; j += WIDTH) {
            const Vector theta = at_theta(j), teacher = at_teacher(j);
            const Integers both = allowed(theta) & allowed(teacher);
            store(base_ + j, both ? theta - top : broadcast(NOTHING));
            store(ratio_ + j, both ? ratio_of(theta, teacher) : Vector{});
        }
    }

    template <class Exponents, bool WITH_MOMENTS, class At>
    Sums sums(At exponents_at) const {
        Sums found;
        for_pieces([&](long first, long end) {
            Exponents exponents[PIECE / WIDTH], most = exponents[0] = exponents_at(first);
            for (long j = first + WIDTH, i = 1; j < end; j += WIDTH, ++i) {
                exponents[i] = exponents_at(j);
                most = larger(exponents[i], most);
            }
            const double top = ::largest(most);
            if (top == NOTHING) return;
            found.rise_to(top);
            Vector total{}, mean{}, square{}, rise{}, rise_square{};
            for (long j = first, i = 0; j < end; j += WIDTH, ++i) {
                const Vector e = exponential(below(exponents[i], found.top)), ratio = load(ratio_ + j);
                const Vector weighted = e * ratio;
                total += e, mean += weighted;
                if constexpr (WITH_MOMENTS) {
                    const Vector rising = larger(weighted, Vector{});
                    square += weighted * ratio, rise += rising, rise_square += rising * ratio;
                }
            }
            found.total += sum(total), found.mean += sum(mean);
            found.square += sum(square), found.rise += sum(rise), found.rise_square += sum(rise_square);
        });
        return found;
    }

    double log_sum(const float* logits) const {
        const double top = logits == theta_ ? largest : largest_teacher_;
        double total = 0;
        for_pieces([&](long first, long end) {
            Vector own{};
            for (long j = first; j < end; j += WIDTH)
                own += exponential(below(load_some(logits + j, count_ - j, NOTHING), top));
            total += sum(own);
        });
        return top + std::log(total);
    }

    double entropy(const float* logits, double top) const {
        double likeliest = 0, others = 0, spread = 0;
        for_pieces([&](long first, long end) {
            Vector own{}, far{}, tops{};
            for (long j = first; j < end; j += WIDTH) {
                const Vector x = larger(below(load_some(logits + j, count_ - j, NOTHING), top), broadcast(-1e30f));
                const Integers is_top = x == 0.0f;
                const Vector weights = is_top ? Vector{} : exponential(x);
                tops += is_top ? broadcast(1.0f) : Vector{};
                own += weights, far -= weights * x;
            }
            likeliest += sum(tops), others += sum(own), spread += sum(far);
        });
        return std::log(likeliest) + std::log1p(others / likeliest) + spread / (likeliest + others);
    }

    const float *theta_, *teacher_;
    long count_;
    float *base_, *ratio_;  // theta less its largest, and ratio; minus infinity and 0 where either rules the token out
    double largest_teacher_, lowest_, highest_;  // the range of teacher − theta
    float top_theta_, top_teacher_;              // the largest that both allow
};
