// The mixture of two models, row by row, and what is told of it: sampling/mixture.py.
#include "alpha.h"
#include "threads.h"

namespace {

enum Method { FIXED, KL_SYMMETRY, ESS_BALANCE, ENTROPY, KL_BUDGET };  // as in cpu/mixer.py

// What is told of a row, as in sampling/mixture.py.
struct Numbers {
    double alpha, log_z, kl_theta, kl_teacher, ess_theta, ess_teacher, is_clamped, is_disjoint, is_sound;
    double normaliser_theta, normaliser_teacher;
};

// Whether nothing can be drawn: no token is possible under both models, or the support leaves a student that decides
// alone none. The teacher, whose support it is, keeps its likeliest.
bool leaves_nothing(const PairRow& pair, double alpha) {
    return alpha == 0 ? pair.largest == NOTHING : alpha != 1 && pair.is_disjoint;
}

Numbers describe(const PairRow& pair, double alpha, bool is_clamped, const Sums& mixed) {
    const double infinity = std::numeric_limits<double>::infinity();
    const bool is_theta = alpha == 0, is_teacher = alpha == 1, is_end = is_theta || is_teacher;
    const bool is_disjoint = leaves_nothing(pair, alpha);
    Numbers told{};
    told.alpha = alpha, told.is_clamped = is_clamped, told.is_disjoint = is_disjoint, told.is_sound = true;
    told.normaliser_theta = pair.whole_theta, told.normaliser_teacher = pair.whole_teacher;
    told.ess_theta = is_theta, told.ess_teacher = is_teacher;
    if (pair.is_disjoint) {
        told.log_z = is_disjoint ? -infinity : 0;
        told.kl_theta = is_theta && !is_disjoint ? 0 : infinity, told.kl_teacher = is_teacher ? 0 : infinity;
        return told;
    }
    const double mean = mixed.mean / mixed.total - pair.rest;
    if (!is_end) told.log_z = std::min(mixed.log() - pair.whole_theta - alpha * (pair.centre + pair.rest), 0.0);
    if (!is_theta) told.kl_theta = std::max(alpha * mean - told.log_z, 0.0);
    if (!is_teacher) told.kl_teacher = std::max((alpha - 1) * mean - told.log_z, 0.0);
    // One model alone may draw what the other rules out; a mixture draws nothing that either rules out.
    if (is_teacher && pair.teacher_alone) told.kl_theta = infinity;
    if (is_theta && pair.theta_alone) told.kl_teacher = infinity;
    // Σ π_θ²/q = Z(α) Z(−α), and Σ π_t²/q = Z(α) Z(2 − α)
    const auto size = [&](double beta) {
        return std::exp(std::min(-told.log_z - pair.log_z(pair.at<false>(beta), beta), 0.0));
    };
    if (!is_theta && !pair.theta_alone) told.ess_theta = size(-alpha);
    if (!is_teacher && !pair.teacher_alone) told.ess_teacher = size(2 - alpha);
    return told;
}

struct Mixing {
    Method method;
    double given;  // the α of FIXED, the budget of KL_BUDGET
    double alpha_min, alpha_max;

    Found found(const PairRow& pair) const {
        switch (method) {
            case KL_SYMMETRY:
                return kl_symmetry(pair);
            case ESS_BALANCE:
                return ess_balance(pair);
            case ENTROPY:
                return entropy(pair);
            case KL_BUDGET:
                return kl_budget(pair, given);
            default:
                return {given, false};
        }
    }
};

Numbers mix_row(const float* theta, const float* teacher, long count, const Mixing& mixing, bool is_forced,
                float* logits, float* scratch) {
    const PairRow pair(theta, teacher, count, scratch);
    if (!pair.is_sound) {
        std::copy(teacher, teacher + count, logits);
        return {};
    }
    const Found found = mixing.found(pair);
    double alpha = bounded(found.alpha, mixing.alpha_min, mixing.alpha_max);
    const bool is_clamped = alpha != found.alpha && !is_forced;
    if (is_forced) alpha = 1;
    if (found.may_be_refined && !is_clamped && !is_forced) {
        // The search's last step, from exponents that are exact where its own were rounded.
        const double step = Moments(pair.exactly_at<true>(alpha), pair.rest).correction();
        if (step == step) alpha = bounded(alpha + bounded(step, -SLACK, SLACK), mixing.alpha_min, mixing.alpha_max);
    }
    const Sums mixed = pair.is_disjoint ? Sums{} : pair.exactly_at<false>(alpha);
    if (alpha == 1 || leaves_nothing(pair, alpha)) {  // that ends with an error; until then readers must find numbers
        std::copy(teacher, teacher + count, logits);
    } else if (alpha == 0) {
        std::copy(theta, theta + count, logits);
    } else {
        const double whole = mixed.log();
        for (long j = 0; j < count; j += WIDTH)
            store_some(logits + j, count - j, (pair.exact(j, alpha) - whole).narrowed());
    }
    return describe(pair, alpha, is_clamped, mixed);
}

}  // namespace

// How many numbers of scratch each thread needs.
extern "C" long mixture_scratch(long vocabulary) { return PairRow::scratch_size(vocabulary); }

// theta, teacher (rows, vocabulary), their rows so far apart as their strides say; forced (rows): whether the teacher
// decides alone -> logits (rows, vocabulary), numbers (rows, 11).
extern "C" void mix_rows(const float* theta, long theta_stride, const float* teacher, long teacher_stride,
                         const uint8_t* forced, long method, double given, double alpha_min, double alpha_max,
                         float* logits, double* numbers, float* scratch, long rows, long vocabulary, long threads) {
    const Mixing mixing{static_cast<Method>(method), given, alpha_min, alpha_max};
    const long size = PairRow::scratch_size(vocabulary);
    for_each_chunk(rows, threads, [&](long row, long thread) {
        reinterpret_cast<Numbers*>(numbers)[row] =
            mix_row(theta + row * theta_stride, teacher + row * teacher_stride, vocabulary, mixing, forced[row],
                    logits + row * vocabulary, scratch + thread * size);
    });
}
