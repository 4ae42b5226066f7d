// A decoder's layers, one kernel after the other without a word from Python. See cpu/cpu_layers.py for their order.
#include "attention.h"
#include "products.h"
#include "rows.h"

namespace {

enum Stage { WRITE, ATTEND, OUTPUT, MLP, STAGES };  // of a layer; as in cpu/structures.py

struct Layer {
    const float *input_norm, *post_norm, *query_norm, *key_norm;  // those of queries and keys may be null
    float* pool;                                                  // (slots, 2, kv_heads, head_dim)
    Weight qkv, output, gate_up, down;
};

struct Layers {
    const Layer* layers;
    int64_t num_layers, heads, kv_heads, head_dim, block_size;
    double epsilon;
};

struct Pass {
    int64_t rows, threads;
    float *residual, *normed, *qkv, *attended, *inner;  // (rows, …)
    float* added;                                       // (rows, hidden): for what ranks add up themselves, or null
    const float *cosines, *sines;                       // (rows, head_dim / 2)
    const int64_t* slots;                               // (rows,)
    void* memory;                                       // layers_memory bytes
    // As `attend` takes them.
    const int64_t *order, *tables, *items;
    int64_t num_shared, num_items;
    float *scores, *scratch;
    int64_t scratch_size, attention_threads;
};

void run(const Layers& model, const Layer& layer, Stage stage, const Pass& pass) {
    const long rows = pass.rows, hidden = layer.output.columns;
    const auto multiply = [&](const Weight& weight, const float* x, float* out, Ending ending) {
        multiply_packed(&weight, x, out, rows, ending, pass.memory, pass.threads);
    };
    const auto add = [&](const Weight& weight, const float* x) {
        multiply(weight, x, pass.added ? pass.added : pass.residual, pass.added ? PLAIN : ADD);
    };
    switch (stage) {
        case WRITE:
            norm(pass.residual, layer.input_norm, model.epsilon, pass.normed, rows, hidden, pass.threads);
            multiply(layer.qkv, pass.normed, pass.qkv, PLAIN);
            return rotate_and_write(pass.qkv, pass.cosines, pass.sines, layer.query_norm, layer.key_norm, model.epsilon,
                                    pass.slots, layer.pool, rows, model.heads, model.kv_heads, model.head_dim,
                                    pass.threads);
        case ATTEND:
            return attend(pass.qkv, layer.qkv.columns, layer.pool, pass.attended, pass.scores, pass.order, pass.tables,
                          pass.items, pass.num_shared, pass.num_items, model.heads, model.kv_heads, model.head_dim,
                          model.block_size, pass.scratch, pass.scratch_size, pass.attention_threads);
        case OUTPUT:
            return add(layer.output, pass.attended);
        default:
            norm(pass.residual, layer.post_norm, model.epsilon, pass.normed, rows, hidden, pass.threads);
            multiply(layer.gate_up, pass.normed, pass.inner, GATED);
            return add(layer.down, pass.inner);
    }
}

}  // namespace

// How many bytes of memory passes of so many rows need.
extern "C" long layers_memory(const Layers* model, long rows) {
    long most = 0;
    for (long index = 0; index < model->num_layers; ++index) {
        const Layer& layer = model->layers[index];
        for (const Weight* weight : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
            const long size = product_memory(weight, rows);
            most = size > most ? size : most;
        }
    }
    return most;
}

// Stages begin .. end, counted from the first of the first layer.
extern "C" void run_stages(const Layers* model, const Pass* pass, long begin, long end) {
    for (long stage = begin; stage < end; ++stage)
        run(*model, model->layers[stage / STAGES], static_cast<Stage>(stage % STAGES), *pass);
}
