#include "rows.h"

#include <cmath>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr long VALUES_AT_ONCE = 8192;  // with fewer, one thread is done before a second has looked

// Calls act(row) for every row, of `wide` values; rows go to threads some at a time.
template <class Act>
void for_each_row(long rows, long wide, long threads, Act act) {
    const long at_once = VALUES_AT_ONCE / wide + 1;
    for_each_chunk((rows + at_once - 1) / at_once, threads, [&](long chunk, long) {
        const long first = chunk * at_once, end = first + at_once < rows ? first + at_once : rows;
        for (long row = first; row < end; ++row) act(row);
    });
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

extern "C" void norm(const float* x, const float* weight, double epsilon, float* out, long rows, long columns,
                     long threads) {
    for_each_row(rows, columns, threads,
                 [&](long row) { norm_row(x + row * columns, weight, epsilon, out + row * columns, columns); });
}

extern "C" void rotate_and_write(float* qkv, const float* cosines, const float* sines, const float* query_norm,
                                 const float* key_norm, double epsilon, const int64_t* slots, float* pool, long rows,
                                 long heads, long kv_heads, long head_dim, long threads) {
    const long half = head_dim / 2, wide = (heads + 2 * kv_heads) * head_dim;
    for_each_row(rows, wide, threads, [&](long row) {
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
    });
}
