// What happens to rows between products: norms, rotary positions, keys and values into their slots.
#pragma once

#include <cstdint>

extern "C" {

// x, out (rows, columns): RMS norm.
void norm(const float* x, const float* weight, double epsilon, float* out, long rows, long columns, long threads);

// qkv (rows, heads + 2 kv_heads, head_dim): queries are rotated in place; keys, rotated, and values, as they are, go to
// their slots of one layer's pool (slots, 2, kv_heads, head_dim). cosines, sines (rows, head_dim / 2). query_norm and
// key_norm (head_dim) are null where the model has none.
void rotate_and_write(float* qkv, const float* cosines, const float* sines, const float* query_norm,
                      const float* key_norm, double epsilon, const int64_t* slots, float* pool, long rows, long heads,
                      long kv_heads, long head_dim, long threads);
}
