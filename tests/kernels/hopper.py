"""Compiles the kernels of layers and sampler for Hopper, on a machine that may have no GPU; prints their names.

The interpreter runs what the compiler refuses (a Python global in a kernel, branches whose types differ), so running
there is not enough. Launch functions are called as ever, on CPU tensors, but stop after compiling. This is a process of
its own: Triton decides at its import whether to interpret.
"""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ramify.config import AlphaMethod, MixtureConfig
from ramify.gpu import product_forms
from ramify.gpu.kernels.activation import silu_and_multiply
from ramify.gpu.kernels.ahead import Ahead
from ramify.gpu.kernels.bending import Bends, bend
from ramify.gpu.kernels.candidate_ranks import rank_candidates
from ramify.gpu.kernels.codes import read_codes
from ramify.gpu.kernels.controls import ControlTables, control_blocks, count_drawn, match_words
from ramify.gpu.kernels.copied_product import CopiedTiles, copied_gate_up, copied_product
from ramify.gpu.kernels.floors import FloorScratch, find_floors
from ramify.gpu.kernels.following import follow
from ramify.gpu.kernels.narrowing import Cuts, narrow
from ramify.gpu.kernels.norm import add_rms_norm
from ramify.gpu.kernels.packed_rows import packed_gate_up, packed_rows
from ramify.gpu.kernels.packed_tiles import RowBlocks, packed_gate_up_tiles, packed_tiles
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.prefix_noise import add_prefix_noise
from ramify.gpu.kernels.race import BlockScores, KeyWords, draw_tokens, keep_above, score_blocks
from ramify.gpu.kernels.rope_write import rope_and_write
from ramify.gpu.kernels.row_product import Norm, row_gate_up, row_product
from ramify.gpu.kernels.row_stream import RowStream, row_stream
from ramify.gpu.kernels.tile_stream import TileStream, stream_gate_up, tile_stream
from ramify.gpu.kernels.tiled_product import Tiles, tiled_gate_up, tiled_product
from ramify.gpu.kernels.top_logprobs import Processing, Reports, report
from ramify.gpu.kernels.unpacked import unpack, write_out
from ramify.gpu.mixer import mix
from ramify.gpu.packed_forms import tiles_for
from ramify.gpu.packed_parts import DevicePacking, PackedPart
from ramify.gpu.product_forms import FormsByRule, Product
from ramify.gpu.results import Drawn
from ramify.gpu.searches import Searches
from ramify.models.packed_quants import PACKED_FORMATS
from ramify.models.stored import StoredTensor

CPU = torch.device("cpu")
SHARED_MEMORY = 227 * 1024


class Hopper:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_instead_of_running() -> None:
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001
        run(kernel, *arguments, warmup=True, **options)
        print(kernel.__name__)

    driver.set_active(Hopper())
    JITFunction.run = compile_only


def layers(dtype: torch.dtype) -> None:
    tokens, hidden, heads, kv_heads, head_dim = 2, 1024, 16, 8, 128
    x = torch.zeros(tokens, hidden, dtype=dtype)
    numbers = torch.zeros(tokens, dtype=torch.int64)
    for overlap in (False, True):
        add_rms_norm(x, Parts(torch.zeros(8, tokens, hidden), x[0]), x[0], 1e-6, x.clone(), overlap=overlap)
    silu_and_multiply(torch.zeros(tokens, 2 * hidden, dtype=dtype), x)
    weights = (None, torch.zeros(64, hidden, dtype=dtype), torch.zeros(64, 2, 2, 32, 4, dtype=torch.int32))
    asked = [None if weight is None else Ahead.of(weight, 2**16, by_row=weight.ndim == 2) for weight in weights]
    for norm, ahead in product((None, torch.zeros(head_dim, dtype=dtype)), asked):
        rope_and_write(
            Parts.whole(torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)),
            numbers,
            numbers,
            torch.zeros(head_dim // 2),
            1.0,
            torch.zeros(tokens, heads, head_dim, dtype=dtype),
            torch.zeros(tokens, 2, kv_heads, head_dim, dtype=dtype),
            query_norm=norm,
            key_norm=norm,
            eps=1e-6,
            ahead=ahead,
            overlap=True,
        )


def gate_up_tiles(rows: int) -> Tiles:
    gate_up = Product("gate_up", 2 * 8960, 1536, torch.bfloat16)
    tiles = FormsByRule(gate_up, SHARED_MEMORY, is_interpreted=False).of(rows)
    assert isinstance(tiles, Tiles)
    return tiles


def products_of_few_rows(dtype: torch.dtype) -> None:
    hidden, inner = 1536, 8960
    weight = torch.zeros(2 * inner, hidden, dtype=dtype)
    one = weight[:1]
    norm = Norm(weight[0], 1e-6)
    out, tiles = torch.zeros(1, 2 * inner, dtype=dtype), product_forms.ROW_TILES
    row_product(one, weight, out, tiles=tiles, norm=norm, bias=weight[:, 0], overlap=True)
    row_product(one, weight, out, tiles=tiles, adds=True, overlap=True)
    row_product(one, weight, torch.zeros(1, 2 * inner), tiles=product_forms.ROW_HEAD_TILES, overlap=True)
    row_gate_up(one, weight, out[:, :inner], tiles=product_forms.ROW_GATE_UP_TILES, norm=norm, overlap=True)
    for rows in (2, 32, 64):
        x = torch.zeros(rows, hidden, dtype=dtype)
        few = product_forms.tiles_for(rows, 2048, hidden, SHARED_MEMORY)
        tiled_product(x, weight[:2048], torch.zeros(few.splits, rows, 2048), few, overlap=True)
        tiled_gate_up(x, weight, torch.zeros(rows, inner, dtype=dtype), gate_up_tiles(rows), overlap=True)
    x = torch.zeros(300, hidden, dtype=dtype)
    tiled_product(x, weight, torch.zeros(1, 300, 2 * inner, dtype=dtype), Tiles(128, 64, 3, 8), bias=weight[:, 0])
    tiled_gate_up(x, weight, torch.zeros(300, inner, dtype=dtype), Tiles(64, 64, 3, 8, rows=128))


def products_that_stay(dtype: torch.dtype) -> None:
    """By programs that take one piece after the other, and by the copy engine; rows of 11,008 are no whole chunks."""
    for columns in (1536, 11008):
        weight = torch.zeros(2048, columns, dtype=dtype)
        one, norm = weight[:1], Norm(weight[0], 1e-6)
        out = torch.zeros(1, 2048, dtype=dtype)
        stream = RowStream(8, 1024, 4, 4, 2)
        row_stream(one, weight, out, tiles=stream, norm=norm, bias=weight[:, 0], overlap=True)
        row_stream(one, weight, out, tiles=stream, adds=True, overlap=True)
        row_stream(one, weight, torch.zeros(1, 2048), tiles=RowStream(4, 2048, 3, 8, 1))
        row_stream(one, weight, out[:, :1024], tiles=RowStream(4, 1024, 4, 4, 2), norm=norm, is_paired=True)
        for rows in (2, 64):
            x, parts = torch.zeros(rows, columns, dtype=dtype), torch.zeros(2, rows, 2048)
            gated, whole = torch.zeros(rows, 1024, dtype=dtype), torch.zeros(1, rows, 2048, dtype=dtype)
            tile_stream(x, weight, parts, TileStream(64, 128, 4, 4, 2, 64), overlap=True)
            tile_stream(x, weight, whole, TileStream(128, 64, 4, 4, 1, 64, 2), bias=weight[:, 0])
            stream_gate_up(x, weight, gated, TileStream(64, 64, 4, 4, 1, 64, 2), overlap=True)
            copied_product(x, weight, parts, CopiedTiles(64, 128, 4, 4, 2, 64), overlap=True)
            copied_gate_up(x, weight, gated, CopiedTiles(64, 64, 4, 4, 1, 64), overlap=True)


def products_of_few_bits(dtype: torch.dtype) -> None:
    hidden, outputs = 1536, 2048
    for name, quant_format in PACKED_FORMATS.items():
        data = torch.zeros(outputs * hidden // quant_format.block_size * quant_format.block_bytes, dtype=torch.uint8)
        part = DevicePacking(CPU, dtype).pack(StoredTensor(data, quant_format, (outputs, hidden)))
        assert isinstance(part, PackedPart), name
        unpack(part, 0, torch.zeros(outputs, hidden, dtype=dtype))
        write_out(part, 0, torch.zeros(outputs, hidden, dtype=dtype))
        for blocks in (RowBlocks(64, 2), RowBlocks(256)):
            x = torch.zeros(300, hidden, dtype=dtype)
            packed_tiles(x, part, torch.zeros(blocks.splits, 300, outputs), blocks)
        packed_gate_up_tiles(x, part, torch.zeros(300, outputs // 2, dtype=dtype), blocks)
        for rows in (1, 8, 16, 128) if name == "INT4x128" else (1, 32):
            x, bias = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(outputs, dtype=dtype)
            norm = Norm(torch.zeros(hidden, dtype=dtype), 1e-6) if rows == 1 else None
            tiles = tiles_for(rows, outputs, hidden, part.bits, is_paired=False, can_split=True)
            packed_rows(x, part, torch.zeros(tiles.splits, rows, outputs), tiles, overlap=True)
            tiles = tiles_for(rows, outputs, hidden, part.bits, is_paired=False, can_split=False)
            packed_rows(
                x, part, torch.zeros(1, rows, outputs, dtype=dtype), tiles, bias=bias, norm=norm, adds=rows == 1
            )
            tiles = tiles_for(rows, outputs // 2, hidden, part.bits, is_paired=True, can_split=False)
            packed_gate_up(x, part, torch.zeros(rows, outputs // 2, dtype=dtype), tiles, norm=norm, overlap=True)


def floors_of(vocab_size: int) -> None:
    rows = 2
    logits, ones, numbers = torch.zeros(rows, vocab_size), torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    scores, scratch = BlockScores.empty(rows, vocab_size, CPU), FloorScratch.empty(rows, vocab_size, CPU)
    find_floors(logits, ones, scores, top_k=numbers, top_p=ones, min_p=ones, scratch=scratch, floors=ones)


def sampler(vocab_size: int) -> None:
    rows = 2
    logits, ones = torch.zeros(rows, vocab_size), torch.ones(rows)
    numbers = torch.zeros(rows, dtype=torch.int64)
    scores = BlockScores.empty(rows, vocab_size, CPU)
    score_blocks(logits, ones, scores)
    floors_of(vocab_size)
    keep_above(logits, ones, ones, scores)
    tables, other = ControlTables.empty(rows, vocab_size, CPU), BlockScores.empty(rows, vocab_size, CPU)
    match_words(numbers, numbers, tables)
    control_blocks(
        logits, ones, numbers, numbers, tables, track=0, controlled=logits.clone(), raw_scores=other, scores=scores
    )
    count_drawn(numbers, numbers, numbers, tables)
    words = KeyWords(numbers, numbers, numbers, numbers)
    for floors in (None, ones):
        draw_tokens(logits, ones, words, scores, token_ids=numbers, logprobs=ones, faults=numbers.int(), floors=floors)
    for processing in (None, Processing(ones, ones)):
        report(logits, scores, numbers, Reports.empty(rows, 20, CPU), processing, asked=numbers)
    report(logits, scores, numbers, Reports.empty(rows, 20, CPU), with_ranks=False)
    rank_candidates(logits, scores, numbers[:, None], numbers[:, None].int())
    Searches(rows, CPU).choose(Drawn.empty(rows, 20, CPU))
    block_tables = torch.zeros(rows, 4, dtype=torch.int32)
    follow(
        torch.zeros(5, rows, dtype=torch.int64),
        numbers,
        block_tables,
        block_tables.clone(),
        torch.zeros(2, 32, 2, 2, 16),
        block_size=16,
    )
    bend(logits, ones, scores, Bends(*[ones] * len(Bends._fields)), bent=logits, bent_temperatures=ones)
    add_prefix_noise(logits, ones, ones, scores, words, ones, noisy=logits.clone())
    codes = torch.ones(rows, 2, dtype=torch.float64)
    read_codes(logits, ones, ones, ones, codes, token_ids=numbers, following=codes)
    narrow(logits, ones, Cuts(*[ones] * len(Cuts._fields)), words, ones)


def mixture(vocab_size: int) -> None:
    rows = 2
    logits, first = torch.zeros(rows, vocab_size), torch.zeros(rows, dtype=torch.bool)
    for method in get_args(AlphaMethod):
        config = MixtureConfig(
            alpha_method=method,
            alpha=0.5 if method == "fixed" else None,
            kl_budget=0.1 if method == "kl_budget" else None,
        )
        mix(logits, logits.clone(), config, first=first, special_token_ids=torch.zeros(1, dtype=torch.int64))


if __name__ == "__main__":
    compile_instead_of_running()
    layers(torch.bfloat16)
    products_of_few_rows(torch.bfloat16)
    products_that_stay(torch.bfloat16)
    products_of_few_bits(torch.bfloat16)
    sampler(151_936)
    for small in (96, 8_192, 8_193, 49_152):  # rows that a sample holds whole take another way
        floors_of(small)
    mixture(151_936)
