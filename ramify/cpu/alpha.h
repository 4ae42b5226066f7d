// How much of the teacher: α of one row, by each method. sampling/alpha.py has the formulas, and says why each number.
#pragma once

#include "pair.h"

constexpr int STEPS = 10, BALANCE_STEPS = STEPS + 1;
constexpr double IDENTICAL = 1e-4, SLACK = 1e-4, EDGE = 1e-6;
constexpr double ROUNDING = 1e-7, NOISY_SPAN = 16, MOST_NOISE = 10;
constexpr double LEAST_FALL = 1e-5, NEAR = 1e-7, SETTLED = 1e-7, LEAST_GROWTH = 1e-300;
constexpr int BUDGET_STEPS = 14;
constexpr double SPARED = 1e-4, SPENT = 5e-5;

struct Found {
    double alpha;
    bool may_be_refined;
};

static inline double rounded(double alpha) { return static_cast<float>(alpha); }

static inline double bounded(double value, double least, double most) { return std::min(std::max(value, least), most); }

// Of d under some q.
struct Moments {
    double mean, square, rise, rise_square;

    Moments(const Sums& sums, double rest)
        : mean(sums.mean / sums.total - rest),
          square(sums.square / sums.total),
          rise(sums.rise / sums.total),
          rise_square(sums.rise_square / sums.total) {}

    // Newton's step towards E[d] = 0; NaN where one of rise and fall is nothing beside the other.
    double correction() const {
        const double fall = rise - mean, fall_square = square - rise_square;
        if (!(fall > LEAST_FALL * rise)) return std::numeric_limits<double>::quiet_NaN();
        return -(std::log(rise) - std::log(fall)) / (rise_square / rise + fall_square / fall);
    }
};

// One end of the bracket, with log Z and its slope there.
struct Tangent {
    double alpha, value, slope;
};

// Where two tangents of a convex function meet; halfway if rounding puts that outside.
static inline double crossing(const Tangent& low, const Tangent& high) {
    const double rise = (low.value - low.slope * low.alpha) - (high.value - high.slope * high.alpha);
    const double found = rise / (high.slope - low.slope);
    return found > low.alpha && found < high.alpha ? found : (low.alpha + high.alpha) / 2;
}

static inline Found kl_symmetry(const PairRow& pair) {
    if (pair.is_disjoint || pair.span <= IDENTICAL) return {0.5, false};
    Tangent low{0, pair.value_at_0, pair.slope_at_0}, high{1, pair.value_at_1, pair.slope_at_1};
    // Only supports that differ may leave no root between the ends; elsewhere such a slope is rounding.
    if (pair.supports_differ() && low.slope >= 0) return {rounded(EDGE), false};
    if (pair.supports_differ() && high.slope <= 0) return {rounded(1 - EDGE), false};
    const double noise = ROUNDING * pair.span * std::min(1 + pair.span / NOISY_SPAN, MOST_NOISE);
    double alpha = rounded(crossing(low, high));
    for (int step = 0; step < STEPS; ++step) {
        const Sums sums = pair.at<true>(alpha);
        const Moments here(sums, pair.rest);
        (here.mean < 0 ? low : high) = {alpha, pair.log_z(sums, alpha), here.mean};
        const double next = alpha + here.correction();
        const bool is_inside = next >= low.alpha && next <= high.alpha;
        // Where E[d] is as good as 0, its sign and all that follows from it may be noise.
        const bool is_root = std::abs(here.mean) <= noise;
        // What Newton leaves after a step is its square.
        const double variance = std::max(here.square - here.mean * here.mean, 0.0);
        const bool is_near = is_inside && here.mean * here.mean <= NEAR * variance;
        if (!is_root || is_near) alpha = rounded(is_inside ? next : crossing(low, high));
        if (is_root || is_near) break;
    }
    return {alpha, true};
}

static inline Found ess_balance(const PairRow& pair) {
    double alpha = 0.5, low = 0, high = 1;
    if (pair.is_disjoint || pair.span <= IDENTICAL) return {alpha, false};
    for (int step = 0; step < BALANCE_STEPS; ++step) {
        const Sums before = pair.finely_at(-alpha), beyond = pair.finely_at(2 - alpha);
        const double excess = before.log() - beyond.log() + 2 * pair.rest;
        (excess < 0 ? low : high) = alpha;
        const double growth = beyond.mean / beyond.total - before.mean / before.total;
        const double next = alpha - excess / std::max(growth, LEAST_GROWTH);
        const double following = rounded(next >= low && next <= high ? next : (low + high) / 2);
        const bool has_settled = std::abs(following - alpha) <= SETTLED;
        alpha = following;
        if (has_settled) break;
    }
    return {alpha, false};
}

static inline Found entropy(const PairRow& pair) {
    const double of_theta = pair.theta_entropy(), total = of_theta + pair.teacher_entropy();
    return {total > 0 ? of_theta / total : 0.5, false};
}

static inline Found kl_budget(const PairRow& pair, double budget) {
    if (pair.is_disjoint) return {0.5, false};
    const double of_theta = pair.fine_log_sum_theta(), wanted = budget * (1 - SPARED);
    struct Spent {
        double divergence, slope;  // KL(q‖π_θ)
    };
    const auto spent_at = [&](double alpha) {
        const Sums sums = pair.finely_at(alpha);
        const double mean = sums.mean / sums.total, variance = sums.square / sums.total - mean * mean;
        return Spent{std::max(alpha * mean - sums.log() + of_theta, 0.0), alpha * variance};
    };
    const double of_teacher = spent_at(1).divergence;
    if (of_teacher <= wanted) return {pair.supports_differ() ? 1 - EDGE : 1, false};
    // Where the teacher rules tokens out, any of its weight costs what the student would have given them.
    if (pair.theta_alone && spent_at(0).divergence > wanted) return {0, false};
    double low = 0, high = 1, alpha = std::sqrt(wanted / of_teacher);
    for (int step = 0; step < BUDGET_STEPS; ++step) {
        const Spent spent = spent_at(alpha);
        if (std::abs(spent.divergence - wanted) <= SPENT * budget) return {alpha, false};
        (spent.divergence <= wanted ? low : high) = alpha;
        const double root = std::sqrt(spent.divergence);
        const double next = alpha + 2 * root * (std::sqrt(wanted) - root) / std::max(spent.slope, LEAST_GROWTH);
        alpha = next > low && next < high ? next : (low + high) / 2;
    }
    return {low, false};  // the most that is known to be within
}
