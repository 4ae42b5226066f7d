// x times packed weights, and what becomes of it. See cpu/panels.py for the layout.
#include "products.h"

#include <sys/mman.h>

#include "fixed_tiles.h"
#include "int8_tiles.h"
#include "panel_tiles.h"
#include "threads.h"

namespace {

enum Form { NUMBERS, FIXED, INT8 };  // of x, for weights that are integers; see cpu/panels.py

constexpr long FORM_ROWS = 16;  // rows that a thread writes in another form at a time

long num_panels(const Part& part) { return (part.columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }

Form form_of(const Weight& weight, long rows) {
    if (weight.least_int8_rows && rows >= weight.least_int8_rows) return INT8;
    return rows <= weight.most_fixed_rows ? FIXED : NUMBERS;
}

// The bytes that come before a form of x: its columns in the weight's order.
long ordered_size(const Weight& weight, long rows) {
    return weight.order ? (rows * weight.depth * static_cast<long>(sizeof(float)) + 63) / 64 * 64 : 0;
}

void order_columns(const Weight& weight, const float* x, float* ordered, long rows, long threads) {
    for_each_chunk((rows + FORM_ROWS - 1) / FORM_ROWS, threads, [&](long chunk, long) {
        const long first = chunk * FORM_ROWS, end = first + FORM_ROWS < rows ? first + FORM_ROWS : rows;
        for (long row = first; row < end; ++row)
            for (long k = 0; k < weight.depth; ++k)
                ordered[row * weight.depth + k] = x[row * weight.depth + weight.order[k]];
    });
}

struct Product {
    const float* x;
    const Part* parts;
    float* out;
    long depth, columns;  // of the output
    Ending ending;
    FixedRows fixed;  // x as fixed-point numbers, or null
    Int8Rows int8;    // x as integers, or null
};

// sums (rows, TILE_COLUMNS) = x (rows, depth) * one panel, and the bias.
void multiply_part(const Product& product, const Part& part, long panel, long first, long rows, float* sums) {
    const float* x = product.x + first * product.depth;
    with_format(part.format, [&](auto format) {
        using Format = decltype(format);
        const uint8_t* units = part.panels + panel * (product.depth / Format::UNIT) * Format::UNIT_BYTES;
        if constexpr (Format::HOLDS_INTEGERS)
            if (product.int8.numbers)
                return multiply_int8_panel<Format>(product.int8, units, first, rows, product.depth, sums);
        if constexpr (fixed_rows<Format>() > 0)
            if (product.fixed.blocks)
                return multiply_fixed_panel<Format>(product.fixed, units, first, rows, product.depth, sums);
        multiply_panel<Format>(x, units, rows, product.depth, sums);
    });
    if (!part.bias) return;
    const long column = panel * TILE_COLUMNS, left = part.columns - column;
    for (long i = 0; i < rows; ++i)
        for (long j = 0; j < (left < TILE_COLUMNS ? left : TILE_COLUMNS); ++j)
            sums[i * TILE_COLUMNS + j] += part.bias[column + j];
}

// Writes a tile of sums to `wide` columns of the output: as it is, or added to what is there.
void finish(const Product& product, long row, long rows, long column, long wide, const float* sums) {
    for (long i = 0; i < rows; ++i) {
        const float* values = sums + i * TILE_COLUMNS;
        float* to = product.out + (row + i) * product.columns + column;
        if (wide >= TILE_COLUMNS) {
            for (long j = 0; j < TILE_COLUMNS; j += WIDTH)
                store(to + j, product.ending == ADD ? load(to + j) + load(values + j) : load(values + j));
        } else {
            for (long j = 0; j < wide; ++j) to[j] = product.ending == ADD ? to[j] + values[j] : values[j];
        }
    }
}

void multiply_chunk(const Product& product, long panel, long first, long rows) {
    alignas(64) float sums[ROWS_AT_ONCE * TILE_COLUMNS];
    const Part* part = product.parts;
    long column = panel * TILE_COLUMNS;
    if (product.ending == GATED) {  // silu(gate) * up
        alignas(64) float gates[ROWS_AT_ONCE * TILE_COLUMNS];
        multiply_part(product, part[0], panel, first, rows, gates);
        multiply_part(product, part[1], panel, first, rows, sums);
        for (long j = 0; j < rows * TILE_COLUMNS; j += WIDTH) {
            const Vector gate = load(gates + j);
            store(sums + j, gate / (1.0f + power_of_two(gate * -1.44269504f)) * load(sums + j));
        }
    } else {
        long before = 0;  // columns of the parts before this one
        for (; panel >= num_panels(*part); ++part) panel -= num_panels(*part), before += part->columns;
        column = before + panel * TILE_COLUMNS;
        multiply_part(product, *part, panel, first, rows, sums);
    }
    finish(product, first, rows, column, part->columns - panel * TILE_COLUMNS, sums);
}

}  // namespace

// For memory that begins at a page. Where the system has no huge pages, nothing changes.
extern "C" void ask_for_huge_pages(void* memory, long size) {
#if defined(MADV_HUGEPAGE)
    madvise(memory, size, MADV_HUGEPAGE);
#endif
}

extern "C" long tile_columns() { return TILE_COLUMNS; }

// How many bytes the panels of a weight take.
extern "C" long panels_size(long format, long rows, long depth) {
    const long panels = (rows + TILE_COLUMNS - 1) / TILE_COLUMNS;
    return with_format(format,
                       [&](auto each) { return panels * (depth / decltype(each)::UNIT) * decltype(each)::UNIT_BYTES; });
}

// stored (rows, depth / UNIT blocks) -> panels; what is beyond the last row is zero.
extern "C" void pack(long format, const uint8_t* stored, uint8_t* panels, long rows, long depth, long threads) {
    with_format(format, [&](auto each) {
        using Format = decltype(each);
        const long units = depth / Format::UNIT, num_panels = (rows + TILE_COLUMNS - 1) / TILE_COLUMNS;
        for_each_chunk(num_panels, threads, [&](long panel, long) {
            uint8_t* to = panels + panel * units * Format::UNIT_BYTES;
            const long left = rows - panel * TILE_COLUMNS, columns = left < TILE_COLUMNS ? left : TILE_COLUMNS;
            if (columns < TILE_COLUMNS) memset(to, 0, units * Format::UNIT_BYTES);
            for (long column = 0; column < columns; ++column) {
                const uint8_t* from = stored + (panel * TILE_COLUMNS + column) * units * Format::BLOCK_BYTES;
                for (long unit = 0; unit < units; ++unit)
                    Format::put(from + unit * Format::BLOCK_BYTES, to + unit * Format::UNIT_BYTES, column);
            }
        });
    });
}

// rows (count) of a packed weight -> out (count, depth), as numbers.
extern "C" void unpack_rows(long format, const uint8_t* panels, const int64_t* rows, float* out, long count, long depth,
                            long threads) {
    with_format(format, [&](auto each) {
        using Format = decltype(each);
        for_each_chunk(count, threads, [&](long index, long) {
            alignas(64) float numbers[DEPTH_AT_ONCE * WIDTH];
            const long panel = rows[index] / TILE_COLUMNS, column = rows[index] % TILE_COLUMNS;
            const uint8_t* from = panels + panel * (depth / Format::UNIT) * Format::UNIT_BYTES;
            for (long k = 0; k < depth; k += DEPTH_AT_ONCE) {
                const long some = depth - k < DEPTH_AT_ONCE ? depth - k : DEPTH_AT_ONCE;
                unpack<Format, 1>(from, k, k + some, column / WIDTH, numbers);
                for (long i = 0; i < some; ++i) out[index * depth + k + i] = numbers[i * WIDTH + column % WIDTH];
            }
        });
    });
}

// Up to how many rows of x are to be fixed-point numbers for weights of a format; 0 if they may not be. `alike`: rows
// of any number are to have one form.
extern "C" long most_fixed_rows(long format, long alike, long has_wide_products) {
    return with_format(format, [&](auto each) {
        constexpr long possible = fixed_rows<decltype(each)>();
        return !alike ? fastest_fixed_rows<decltype(each)>(has_wide_products) : possible < EVERY ? 0 : possible;
    });
}

// From how many rows of x on integers of 8 bits are to be their form, where that is asked for; 0 if they may not be.
extern "C" long least_int8_rows(long format, long alike) {
    return with_format(format, [&](auto each) {
        using Format = decltype(each);
        if constexpr (Format::HOLDS_INTEGERS) return alike ? 1 : most_exact_rows<Format>() + 1;
        return 0l;
    });
}

extern "C" long product_memory(const Weight* weight, long rows) {
    const Form form = form_of(*weight, rows);
    const long formed = form == FIXED  ? FixedRows::size(rows, weight->depth)
                        : form == INT8 ? Int8Rows::size(rows, weight->depth)
                                       : 0;
    return ordered_size(*weight, rows) + formed;
}

extern "C" void multiply_packed(const Weight* weight, const float* x, float* out, long rows, long ending, void* memory,
                                long threads) {
    if (!rows) return;
    const long depth = weight->depth;
    if (weight->order) {
        order_columns(*weight, x, static_cast<float*>(memory), rows, threads);
        x = static_cast<float*>(memory);
        memory = static_cast<char*>(memory) + ordered_size(*weight, rows);
    }
    const Form form = form_of(*weight, rows);
    const FixedRows fixed{form == FIXED ? static_cast<FixedBlock*>(memory) : nullptr};
    const Int8Rows int8 = form == INT8 ? Int8Rows::in(memory, rows, depth) : Int8Rows{};
    if (form != NUMBERS) {
        for_each_chunk((rows + FORM_ROWS - 1) / FORM_ROWS, threads, [&](long chunk, long) {
            for (long row = chunk * FORM_ROWS; row < rows && row < (chunk + 1) * FORM_ROWS; ++row)
                if (form == FIXED)
                    make_fixed_row(fixed, x, row, depth);
                else
                    quantise_row(int8, x, row, depth);
        });
    }
    const Product product{x, weight->parts, out, depth, weight->columns, static_cast<Ending>(ending), fixed, int8};
    long panels = 0;
    for (long part = 0; part < (ending == GATED ? 1 : weight->num_parts); ++part)
        panels += num_panels(product.parts[part]);
    const long blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const long rows_per_block = (rows + blocks - 1) / blocks;
    // Block by block: its rows of x stay in the second cache while panels pass by.
    for_each_in_stretches(blocks * panels, threads, [&](long chunk, long) {
        const long first = chunk / panels * rows_per_block, left = rows - first;
        multiply_chunk(product, chunk % panels, first, left < rows_per_block ? left : rows_per_block);
    });
}
