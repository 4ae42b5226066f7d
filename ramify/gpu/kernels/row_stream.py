"""One row times a weight, by few programs that stay: what row_product.py does, with reads that never pause.

    weight       (outputs, columns)       a tile is OUTPUTS of its rows and COLUMNS of their columns
    copies       | t + 3 | t + 4 | ...    ahead of the sums, from one block of outputs to the next
    a program    blocks of outputs p, p + P, p + 2P, ...; the row waits in shared memory, normed once

Programs of row_product.py are thousands. Where kernels overlap, those of the next one take whatever room the last of
this one leave, so that some processors have many of them and others none. Here every processor has its share, because
no more fit; and the first tiles are on their way while the kernels before are still at work, however long these take.
Gluon, Triton's lower language, for numbers of two bytes.
"""

# ruff: noqa: RUF005 - the compiler knows no starred tuples

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramify.gpu.kernels.overlap import launch_options
from ramify.gpu.kernels.row_product import Norm


@dataclass(frozen=True, slots=True)
class RowStream:
    """Tiles of so many outputs and columns, so many of them on their way in each program.

    programs: that a processor has at a time.
    """

    outputs: int
    columns: int
    stages: int
    warps: int
    programs: int

    def shared_memory(self, columns: int, itemsize: int, *, num_weights: int = 1) -> int:
        """The bytes that a program takes, with a row of so many columns."""
        lines = -(-columns // self.columns)
        return itemsize * self.columns * (self.stages * num_weights * self.outputs + lines) + SCRATCH


SCRATCH = 1024  # for sums over warps


def row_stream(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    tiles: RowStream,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    adds: bool = False,
    is_paired: bool = False,
    overlap: bool = False,
) -> None:
    """As row_product.row_product and, if it is paired, row_product.row_gate_up."""
    assert x.shape[0] == 1, "one row"
    outputs, columns = out.shape[1], weight.shape[1]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 1
    blocks = triton.cdiv(outputs, tiles.outputs)
    _row_stream[(min(blocks, processors * tiles.programs),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        out,
        outputs,
        columns,
        0.0 if norm is None else norm.eps,
        OUTPUTS=tiles.outputs,
        COLUMNS=tiles.columns,
        CHUNKS=triton.cdiv(columns, tiles.columns),
        STAGES=tiles.stages,
        NORMED=norm is not None,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        PAIRED=is_paired,
        num_warps=tiles.warps,
        **launch_options(overlap),
    )


@gluon.jit
def _copy(target, source, first, lane, end):  # type: ignore[no-untyped-def]
    """Columns first .. of some rows; past the end come zeros, which cost nothing."""
    async_copy.async_copy_global_to_shared(target, source + first, mask=(first + lane < end)[None, :])


@gluon.jit
def _source(weight, block, outputs, columns, lane, OUTPUTS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a block of outputs. Past the last one the last stands again, and is not written."""
    output = block * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    return weight + gl.minimum(output, outputs - 1).to(gl.int64)[:, None] * columns + lane[None, :]


@gluon.jit
def _line(source, lane, columns, CHUNKS: gl.constexpr, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """All columns, chunk by chunk."""
    chunks = ()
    for each in gl.static_range(CHUNKS):
        column = each * COLUMNS + lane
        chunks = chunks + (gl.load(source + column, mask=column < columns, other=0.0, volatile=True),)  # type: ignore[assignment]
    return chunks


@gluon.jit
def _of_outputs(  # type: ignore[no-untyped-def]
    source,
    block,
    outputs,
    OUTPUTS: gl.constexpr,
    LAYOUT: gl.constexpr,
    WANTED: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """What stands in `source` for a block of outputs, and behind all outputs for the pair; if not wanted, zeros."""
    nothing = gl.zeros([OUTPUTS], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    output = block * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    own, pair = nothing, nothing
    if WANTED:
        own = gl.load(source + output, mask=output < outputs, other=0.0, volatile=True).to(gl.float32)
        if PAIRED:
            pair = gl.load(source + outputs + output, mask=output < outputs, other=0.0, volatile=True).to(gl.float32)
    return own, pair


@gluon.jit
def _row_stream(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    x,
    weight,
    bias,
    norm_weight,
    out,
    outputs,
    columns,
    eps,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    NORMED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ADDS: gl.constexpr,
    PAIRED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    warps: gl.constexpr = gl.num_warps()
    number: gl.constexpr = weight.dtype.element_ty
    tiled: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, warps], [1, 0])  # sixteen bytes a thread
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])
    tiles = gl.allocate_shared_memory(number, [STAGES, OUTPUTS, COLUMNS], plain)
    if PAIRED:
        pairs = gl.allocate_shared_memory(number, [STAGES, OUTPUTS, COLUMNS], plain)
    row = gl.allocate_shared_memory(number, [CHUNKS, COLUMNS], line)
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, tiled))
    blocks = gl.cdiv(outputs, OUTPUTS)
    chunks = gl.cdiv(columns, COLUMNS)
    to_pair = outputs.to(gl.int64) * columns

    # What is copied next: chunk `ahead` of the block `coming`; after the last block nothing.
    coming = gl.program_id(0)
    ahead = 0
    end = columns
    source = _source(weight, coming, outputs, columns, lane, OUTPUTS, tiled)
    filled = 0
    for _ in gl.static_range(STAGES - 1):
        _copy(tiles.index(filled), source, ahead * COLUMNS, lane, end)
        if PAIRED:
            _copy(pairs.index(filled), source + to_pair, ahead * COLUMNS, lane, end)
        async_copy.commit_group()
        filled += 1
        ahead += 1
        if ahead == chunks:
            ahead = 0
            coming += gl.num_programs(0)
            source = _source(weight, coming, outputs, columns, lane, OUTPUTS, tiled)
            end = gl.where(coming < blocks, columns, 0)
    # Whatever is read only once is asked for at once, and as volatile: the compiler would move it to where it is used.
    if NORMED:
        norm_line = _line(norm_weight, lane, columns, CHUNKS, COLUMNS)
    own_bias, pair_bias = _of_outputs(bias, gl.program_id(0), outputs, OUTPUTS, tiled, HAS_BIAS, PAIRED)
    if OVERLAP:
        gdc_wait()

    own_line = _line(x, lane, columns, CHUNKS, COLUMNS)
    before, _ = _of_outputs(out, gl.program_id(0), outputs, OUTPUTS, tiled, ADDS, False)
    if NORMED:
        squares = gl.zeros([COLUMNS], gl.float32, layout=gl.SliceLayout(0, tiled))
        for each in gl.static_range(CHUNKS):
            wide = own_line[each].to(gl.float32)
            squares += wide * wide
        scale = gl.rsqrt(gl.sum(squares, 0) / columns + eps)
        for each in gl.static_range(CHUNKS):
            scaled = (own_line[each].to(gl.float32) * scale).to(number)
            row.index(each).store((norm_line[each].to(gl.float32) * scaled.to(gl.float32)).to(number))
    else:
        for each in gl.static_range(CHUNKS):
            row.index(each).store(own_line[each])

    stage = 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        if block != gl.program_id(0):
            own_bias, pair_bias = _of_outputs(bias, block, outputs, OUTPUTS, tiled, HAS_BIAS, PAIRED)
            before, _ = _of_outputs(out, block, outputs, OUTPUTS, tiled, ADDS, False)
        sums = gl.zeros([OUTPUTS, COLUMNS], gl.float32, layout=tiled)
        pair_sums = sums
        for chunk in range(0, chunks):
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            _copy(tiles.index(filled), source, ahead * COLUMNS, lane, end)
            if PAIRED:
                _copy(pairs.index(filled), source + to_pair, ahead * COLUMNS, lane, end)
            async_copy.commit_group()
            filled = gl.where(filled == STAGES - 1, 0, filled + 1)
            ahead += 1
            if ahead == chunks:
                ahead = 0
                coming += gl.num_programs(0)
                source = _source(weight, coming, outputs, columns, lane, OUTPUTS, tiled)
                end = gl.where(coming < blocks, columns, 0)
            values = row.index(chunk).load(gl.SliceLayout(0, tiled)).to(gl.float32)[None, :]
            sums += tiles.index(stage).load(tiled).to(gl.float32) * values
            if PAIRED:
                pair_sums += pairs.index(stage).load(tiled).to(gl.float32) * values
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)

        output = block * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, tiled))
        kept = output < outputs
        dtype: gl.constexpr = out.dtype.element_ty
        total = gl.sum(sums, 1)
        if HAS_BIAS:
            total += own_bias
        if PAIRED:
            up = gl.sum(pair_sums, 1)
            if HAS_BIAS:
                up += pair_bias
            # Rounded where torch's own operators round.
            gate = total.to(dtype).to(gl.float32)
            activated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
            total = activated * up.to(dtype).to(gl.float32)
        if ADDS:
            total = total.to(dtype).to(gl.float32) + before
        gl.store(out + output, total.to(dtype), mask=kept)
    async_copy.wait_group(0)
