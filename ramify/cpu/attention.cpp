// Attention that reads keys and values where they lie, block by block: items of a list of work, taken by threads. See
// cpu/attention_items.py for the list.
#include "attention_many.h"
#include "attention_one.h"
#include "threads.h"

namespace {

void attend_item(const AttentionData& data, const Item& item, float* scratch) {
    const bool is_single = item.queries == data.queries_per_head() && item.query == 0 && item.growth;
    if (is_single) switch (data.head_dim) {  // heads of other sizes go through attend_many
            case 4 * WIDTH:
                return attend_one<4>(data, item, scratch);
            case 8 * WIDTH:
                return attend_one<8>(data, item, scratch);
            case 16 * WIDTH:
                return attend_one<16>(data, item, scratch);
        }
    for (long head = item.head; head < item.head + item.heads; ++head) {
        if (item.queries <= WIDTH)
            attend_many<1>(data, item, head, scratch);
        else if (item.queries <= 2 * WIDTH)
            attend_many<2>(data, item, head, scratch);
        else
            attend_many<TILE_VECTORS>(data, item, head, scratch);
    }
}

}  // namespace

// How many floats of scratch a thread needs for items of up to `queries` queries.
extern "C" long attention_scratch(long queries, long heads, long head_dim) {
    const long panels = (queries + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const long many = (panels * (2 * head_dim + 2) + KEYS) * TILE_COLUMNS + KEYS * head_dim;
    const long one = heads * (2 * head_dim + 2 + KEYS);
    return ((many > one ? many : one) + 15) / 16 * 16;
}

extern "C" void attend(const float* queries, long query_stride, const float* pool, float* out, float* scores,
                       const int64_t* order, const int64_t* tables, const int64_t* items, long num_shared,
                       long num_items, long heads, long kv_heads, long head_dim, long block_size, float* scratch,
                       long scratch_size, long threads) {
    const float scale = 1.44269504088896340736 / std::sqrt(static_cast<double>(head_dim));
    const AttentionData data{queries,      pool,  out,      scores,   order,      tables,
                             query_stride, heads, kv_heads, head_dim, block_size, scale};
    const Item* list = reinterpret_cast<const Item*>(items);
    const auto attend_some = [&](long begin, long end) {
        for_each_chunk(end - begin, threads, [&](long chunk, long thread) {
            attend_item(data, list[begin + chunk], scratch + thread * scratch_size);
        });
    };
    attend_some(0, num_shared);
    attend_some(num_shared, num_items);
}
