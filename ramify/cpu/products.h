// A weight as the kernels read it, field by field as cpu/structures.py writes it, and its product.
#pragma once

#include <cstdint>

enum Ending { PLAIN, ADD, GATED };  // as in cpu/panels.py

struct Part {               // of a weight: outputs that have one number format
    int64_t format;         // GGML's number
    const uint8_t* panels;  // (ceil(columns / TILE_COLUMNS), depth / UNIT, UNIT_BYTES)
    const float* bias;      // (columns,) or null
    int64_t columns;
};

struct Weight {
    const Part* parts;
    int64_t num_parts, depth, columns;  // columns: of the output
    const int64_t* order;               // the column of x that each column of the weight multiplies, or null
    int64_t most_fixed_rows;            // up to how many rows of x are to be fixed-point numbers
    int64_t least_int8_rows;            // from how many rows of x on they are to be integers of 8 bits; 0: never
};

extern "C" {

// How many bytes of memory a product of so many rows needs.
long product_memory(const Weight* weight, long rows);

// x (rows, depth) * weight -> out (rows, columns). The parts' columns stand side by side; those of GATED are gate and
// up. Where the weight is integers, x is first written to `memory` in the form in which it is multiplied.
void multiply_packed(const Weight* weight, const float* x, float* out, long rows, long ending, void* memory,
                     long threads);
}
