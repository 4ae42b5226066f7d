"""The CPU's own kernels beside torch's operators: all products of a step, and one layer's attention, in turns.

Products are bound by reading weights up to some ten rows, then by arithmetic; weights of few bits are read faster.
Attention is bound by reading keys and values for single rows, by arithmetic for prompts and shared prefixes. So GFLOP/s
and GB/s are printed beside the times.

    python bench/cpu.py [--repeats 8] [--formats BF16 Q4_1 Q6_K …] [--busy]

Times are the best of the repeats, in ms, on the shape of the default model. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from machine import processor_name  # type: ignore[import-not-found]
from workloads import MODEL_SHAPE  # type: ignore[import-not-found]

from ramify.cpu import attention_items as attention
from ramify.cpu.library import Library, load
from ramify.cpu.panels import PanelPacking, Product
from ramify.device import torch_attention
from ramify.device.pool import KVPool
from ramify.device.reads import Reads
from ramify.engine.plan import Chunk, SharedPrefix
from ramify.models.families import architecture_from_config
from ramify.models.gguf_quants import FORMATS_BY_NAME, QuantFormat
from ramify.models.linear import Linear
from ramify.models.stored import StoredTensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 9, 3, 64, 16, 4_000
LAYERS_AT_ONCE = 6  # together their keys and values are larger than any cache


def best_ms(repeats: int, clock: Callable[[], float], *ways: Callable[[], object]) -> list[float]:
    """The best time of each way, with the ways taking turns."""
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for index, way in enumerate(ways):
            start = clock()
            way()
            best[index] = min(best[index], (clock() - start) * 1e3)
    return best


def stored(quant_format: QuantFormat, rows: int, depth: int) -> StoredTensor:
    """Random weights; bytes are below 64, so that two of them are a float16 of usual size."""
    size = rows * depth // quant_format.block_size * quant_format.block_bytes
    return StoredTensor(torch.randint(0, 64, (size,), dtype=torch.uint8), quant_format, (rows, depth))


def products(library: Library, formats: list[str], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """The step's shapes, but for depths that are whole blocks of every format: 512 and 1,536."""
    hidden, inner = 512, MODEL_SHAPE["intermediate_size"]
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * MODEL_SHAPE["num_hidden_layers"]
    shapes.append((MODEL_SHAPE["vocab_size"], hidden))

    def packed(name: str) -> list[Product]:
        linears = [Linear(torch.empty(shape, device="meta")) for shape in shapes]
        for linear in linears:
            linear.put(0, stored(FORMATS_BY_NAME[name], *linear.weight.shape), PanelPacking(library))
        return [Product(library, linear) for linear in linears]

    ways = {name: packed(name) for name in ["F32", *formats]}
    dense = [torch.randn(shape) for shape in shapes]
    one_dnn = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in dense]
    columns = "".join(f"{name:>9}" for name in formats)
    print(f"{'products, rows':<22}{'F32':>9}{'GFLOP/s':>9}{'oneDNN':>9}{'linear':>9}{columns}")

    def times_of(rows: int) -> list[float]:
        some = shapes if rows <= 64 else shapes[:-1]  # the head sees only one row of a long prompt
        inputs = {depth: torch.randn(rows, depth) for depth in (hidden, inner)}
        outputs = {outputs: torch.empty(rows, outputs) for outputs, _ in some}

        def ours(name: str) -> None:
            for (outputs_of, depth), product in zip(some, ways[name], strict=False):
                product.multiply(inputs[depth], outputs[outputs_of])

        def theirs() -> None:
            for (_, depth), weight in zip(some, one_dnn, strict=False):
                torch.ops.mkldnn._linear_pointwise(inputs[depth], weight, None, "none", [], "")

        def plain() -> None:
            for (_, depth), weight in zip(some, dense, strict=False):
                torch.nn.functional.linear(inputs[depth], weight)

        packed_ways = [partial(ours, name) for name in formats]
        turns = max(2, repeats // (1 + rows // 256))
        times = best_ms(turns, clock, partial(ours, "F32"), theirs, plain, *packed_ways)
        operations = 2 * rows * sum(outputs * depth for outputs, depth in some)
        rest = "".join(f"{each:9.1f}" for each in times[3:])
        print(f"{rows:<22,}{times[0]:9.1f}{operations / times[0] / 1e6:9.0f}{times[1]:9.1f}{times[2]:9.1f}{rest}")
        return times

    return {f"products of {rows} rows": times_of(rows) for rows in ROWS}


def attention_steps() -> dict[str, tuple[list[Chunk], list[SharedPrefix]]]:
    """What attention has to do in one step in the middle of each workload; blocks are scattered."""
    free = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(free)

    def blocks(tokens: int) -> tuple[int, ...]:
        return tuple(free.pop() for _ in range(-(-tokens // BLOCK_SIZE)))

    def fan(rows: int, prompt: int) -> tuple[list[Chunk], list[SharedPrefix]]:
        common = blocks(prompt)
        chunks = [Chunk([0], prompt + 24, common + blocks(25)) for _ in range(rows)]
        return chunks, [SharedPrefix(len(common), tuple(range(rows)))]

    return {
        "one": ([Chunk([0], 128, blocks(129))], []),
        "fan8@64": fan(8, 64),
        "fan64@1k": fan(64, 1024),
        "mixed32": ([Chunk([0], 64 + 14 * row, blocks(65 + 14 * row)) for row in range(32)], []),
        "prompts of 300": ([Chunk([0] * 300, 0, blocks(300)) for _ in range(6)], []),
        "a prompt of 1,024": ([Chunk([0] * 1024, 0, blocks(1024))], []),
    }


def attention_times(library: Library, repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    architecture = architecture_from_config({**MODEL_SHAPE, "num_hidden_layers": LAYERS_AT_ONCE})
    pool = KVPool(architecture, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    pool.kv.normal_()
    on_kernels, on_torch = attention.CpuAttention(library, pool, HEADS), torch_attention.TorchAttention()
    print(f"{'attention, one layer':<22}{'ours':>9}{'GFLOP/s':>9}{'GB/s':>9}{'torch':>9}")

    def times_of(name: str, chunks: list[Chunk], shared: list[SharedPrefix]) -> list[float]:
        starts = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
        qkv = torch.randn(starts[-1], HEADS + 2 * KV_HEADS, HEAD_DIM)
        out = torch.empty(starts[-1], HEADS * HEAD_DIM)
        queries, keys, values = torch.tensor_split(qkv, (HEADS, HEADS + KV_HEADS), dim=1)
        rows = np.array([len(chunk.token_ids) for chunk in chunks])
        ends, tables = np.array([chunk.start + 1 for chunk in chunks]), [chunk.block_table for chunk in chunks]
        reads = [
            Reads.of(
                np.array(starts[:-1]),
                rows,
                ends,
                tables,
                rule.worthwhile(shared, rows, BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                size=starts[-1],
            )
            for rule in (attention.SHARING, torch_attention.SHARING)
        ]
        work = on_kernels.items(reads[0])
        on_torch.prepare(reads[1], pool)

        def ours() -> None:
            for layer in range(LAYERS_AT_ONCE):
                on_kernels.attend(work, layer, qkv, out)

        def theirs() -> None:
            for layer in range(LAYERS_AT_ONCE):
                on_torch.forward(layer, queries, keys, values)

        times = [each / LAYERS_AT_ONCE for each in best_ms(repeats, clock, ours, theirs)]
        operations = 4 * HEADS * HEAD_DIM * sum(sum(range(chunk.start + 1, chunk.end + 1)) for chunk in chunks)
        held = {block for chunk in chunks for block in chunk.block_table}
        read = len(held) * BLOCK_SIZE * 2 * KV_HEADS * HEAD_DIM * 4
        rates = f"{operations / times[0] / 1e6:9.0f}{read / times[0] / 1e6:9.1f}"
        print(f"{name:<22}{times[0]:9.3f}{rates}{times[1]:9.3f}")
        return times

    return {f"attention of {name}": times_of(name, *step) for name, step in attention_steps().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--formats", nargs="*", metavar="NAME", choices=list(FORMATS_BY_NAME), default=["BF16", "Q4_1"])
    parser.add_argument("--busy", action="store_true", help="one thread, and the time it computed: for a busy machine")
    options = parser.parse_args()
    clock = time.perf_counter
    if options.busy:
        clock = time.process_time
        torch.set_num_threads(1)
    library = load(print)
    results = products(library, options.formats, options.repeats, clock)
    results |= attention_times(library, options.repeats, clock)
    rounded = {name: [round(each, 4) for each in times] for name, times in results.items()}
    print(json.dumps({"ms": rounded, "machine": f"{processor_name()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
