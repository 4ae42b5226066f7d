// What happens to rows between products: norms, rotary positions, keys and values into their slots.
#include <cmath>

#include "vectors.h"

namespace {

constexpr long VALUES_PER_THREAD = 16384;  // with fewer, one thread is done before a second has woken up

long threads_for(long values, long threads) {
    const long wanted = values / VALUES_PER_THREAD + 1;
    return wanted < threads ? wanted : threads;
}

void norm_row(const float* x, const float* weight, float epsilon, float* out, long columns) {
    Vector squares{};
    long j = 0;
    for (; j + WIDTH <= columns; j += WIDTH) squares += load(x + j) * load(x + j);
    float total = sum(squares);
    for (long i = j; i < columns; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / columns + epsilon);
    for (j = 0; j + WIDTH <= columns; j += WIDTH) store(out + j, load(x + j) * scale * load(weight + j));
    for (; j < columns; ++j) out[j] = x[j] * scale * weight[j];
}

// Rotates one head; pairs are (i, i + head_dim / 2). `to` may be `x`.
void rotate(const float* x, const float* cosines, const float* sines, float* to, long half) {
    long j = 0;
    for (; j + WIDTH <= half; j += WIDTH) {
        const Vector first = load(x + j), second = load(x + half + j), cosine = load(cosines + j),
                     sine = load(sines + j);
        store(to + j, first * cosine - second * sine);
        store(to + half + j, second * cosine + first * sine);
    }
    for (; j < half; ++j) {
        const float first = x[j], second = x[half + j];
        to[j] = first * cosines[j] - second * sines[j];
        to[half + j] = second * cosines[j] + first * sines[j];
    }
}

}  // namespace

// x, out (rows, columns): RMS norm.
extern "C" void norm(const float* x, const float* weight, double epsilon, float* out, long rows, long columns,
                     long threads) {
#pragma omp parallel for num_threads(threads_for(rows* columns, threads))
    for (long row = 0; row < rows; ++row) norm_row(x + row * columns, weight, epsilon, out + row * columns, columns);
}

// qkv (rows, heads + 2 kv_heads, head_dim): queries are rotated in place; keys, rotated, and values, as they are, go to
// their slots of one layer's pool (slots, 2, kv_heads, head_dim). cosines, sines (rows, head_dim / 2). query_norm and
// key_norm (head_dim) are null where the model has none.
extern "C" void rotate_and_write(float* qkv, const float* cosines, const float* sines, const float* query_norm,
                                 const float* key_norm, double epsilon, const int64_t* slots, float* pool, long rows,
                                 long heads, long kv_heads, long head_dim, long threads) {
    const long half = head_dim / 2, wide = (heads + 2 * kv_heads) * head_dim;
#pragma omp parallel for num_threads(threads_for(rows* wide, threads))
    for (long row = 0; row < rows; ++row) {
        float* from = qkv + row * wide;
        float* slot = pool + slots[row] * 2 * kv_heads * head_dim;
        const float *cosine = cosines + row * half, *sine = sines + row * half;
        for (long head = 0; head < heads + kv_heads; ++head) {
            float* x = from + head * head_dim;
            const float* weight = head < heads ? query_norm : key_norm;
            if (weight) norm_row(x, weight, epsilon, x, head_dim);
            rotate(x, cosine, sine, head < heads ? x : slot + (head - heads) * head_dim, half);
        }
        const float* values = from + (heads + kv_heads) * head_dim;
        for (long j = 0; j < kv_heads * head_dim; ++j) slot[kv_heads * head_dim + j] = values[j];
    }
}
