// x times a packed weight. See cpu/panels.py for the layout.
#include "vectors.h"

namespace {

constexpr long DEPTH_AT_ONCE = 512;  // of the weight: 128 KiB of a panel stay in the second cache
constexpr long ROWS_AT_ONCE = 192;   // of x: as much again

enum Ending { PLAIN, ADD, GATED };

struct Product {
    const float *x, *panels, *bias;
    float* out;
    long depth, columns;
    Ending ending;
};

// Writes a tile of sums: as it is, added to what is there, or as silu(first half) * second half.
void finish(const Product& product, long row, long count, long column, float* sums) {
    for (long i = 0; i < count; ++i) {
        float* values = sums + i * TILE_COLUMNS;
        if (product.bias)
            for (long j = 0; j < TILE_COLUMNS; ++j) values[j] += product.bias[column + j];  // padded to whole panels
        if (product.ending == GATED) {
            constexpr long half = TILE_COLUMNS / 2;
            for (long j = 0; j < half; j += WIDTH) {
                Vector gate = load(values + j);
                store(values + j, gate / (1.0f + power_of_two(gate * -1.44269504f)) * load(values + half + j));
            }
        }
        const long wide = product.ending == GATED ? TILE_COLUMNS / 2 : TILE_COLUMNS;
        const long first = product.ending == GATED ? column / 2 : column;
        const long left = product.columns - first;
        float* to = product.out + (row + i) * product.columns + first;
        if (left >= wide) {
            for (long j = 0; j < wide; j += WIDTH)
                store(to + j, product.ending == ADD ? load(to + j) + load(values + j) : load(values + j));
        } else {
            for (long j = 0; j < left; ++j) to[j] = product.ending == ADD ? to[j] + values[j] : values[j];
        }
    }
}

void multiply_panel(const Product& product, long first, long rows, long panel) {
    alignas(64) float sums[ROWS_AT_ONCE * TILE_COLUMNS];
    const float* weight = product.panels + panel * product.depth * TILE_COLUMNS;
    for (long k = 0; k < product.depth; k += DEPTH_AT_ONCE) {
        const long depth = product.depth - k < DEPTH_AT_ONCE ? product.depth - k : DEPTH_AT_ONCE;
        const Left x{product.x + first * product.depth + k, product.depth, 1};
        // While several tiles of rows are multiplied by this part of the panel, the next part is prefetched.
        const float *part = weight + k * TILE_COLUMNS, *next = rows > TILE_ROWS ? part + depth * TILE_COLUMNS : nullptr;
        multiply<TILE_VECTORS>(rows, depth, x, part, TILE_COLUMNS, sums, TILE_COLUMNS, k > 0, next);
    }
    finish(product, first, rows, panel * TILE_COLUMNS, sums);
}

}  // namespace

extern "C" long tile_columns() { return TILE_COLUMNS; }

// x (rows, depth), panels (ceil(columns / TILE_COLUMNS), depth, TILE_COLUMNS); `columns` are those of the output.
extern "C" void multiply_packed(const float* x, const float* panels, const float* bias, float* out, long rows,
                                long depth, long columns, long num_panels, long ending, long threads) {
    const Product product{x, panels, bias, out, depth, columns, static_cast<Ending>(ending)};
    if (!rows) return;
    const long blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const long rows_per_block = (rows + blocks - 1) / blocks;
    // A thread keeps its block of rows of x in the second cache while panels pass by; threads divide a single block's
    // panels among them.
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (long block = 0; block < blocks; ++block)
        for (long panel = 0; panel < num_panels; ++panel) {
            const long first = block * rows_per_block, left = rows - first;
            multiply_panel(product, first, left < rows_per_block ? left : rows_per_block, panel);
        }
}

// weight (rows, depth) -> panels. A panel of a gated weight takes half its columns from the first half of the rows
// (gate) and half from the second (up).
extern "C" void pack(const float* weight, float* panels, long rows, long depth, long num_panels, long is_gated,
                     long threads) {
    const long wide = is_gated ? TILE_COLUMNS / 2 : TILE_COLUMNS, end = is_gated ? rows / 2 : rows;
#pragma omp parallel for num_threads(threads)
    for (long panel = 0; panel < num_panels; ++panel)
        for (long column = 0; column < TILE_COLUMNS; ++column) {
            const long row = panel * wide + column % wide;
            const float* from = weight + (column < wide ? row : end + row) * depth;
            float* to = panels + panel * depth * TILE_COLUMNS + column;
            for (long k = 0; k < depth; ++k) to[k * TILE_COLUMNS] = row < end ? from[k] : 0.0f;
        }
}
