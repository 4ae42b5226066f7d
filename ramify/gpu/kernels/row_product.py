"""One row times a weight: bound by reading the weight once, so everything around it is done on the way.

    weight   (outputs, columns)       a program takes BLOCK_OUTPUTS rows of it and walks their columns
    before   x * scale * norm         RMS norm, its mean square found by every program for itself
    after    + bias, + residual       or, where gate and up are one weight, silu(gate) * up

    program    x ------------------------------->         sums in float32, one per thread and output,
               w |tile|tile|tile|tile|tile|tile|          added up once at the end

No sum is split between programs, so nothing has to be added up afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels.overlap import launch_options, start_next, wait_for_last


@dataclass(frozen=True, slots=True)
class RowTiles:
    """What one program holds at a time, and by how many warps; stages: tiles on their way through shared memory."""

    outputs: int
    columns: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of the row before it is multiplied."""

    weight: Tensor  # (columns,)
    eps: float


def row_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    tiles: RowTiles,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    adds: bool = False,
    overlap: bool = False,
) -> None:
    """x (1, columns), weight (outputs, columns) -> out (1, outputs), of any precision; adds: onto what is there."""
    assert x.shape[0] == 1, "one row"
    _launch(x, weight, out, bias, norm, tiles, adds=adds, is_paired=False, overlap=overlap)


def row_gate_up(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    tiles: RowTiles,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    overlap: bool = False,
) -> None:
    """x (1, columns), weight (2 * inner, columns), gate first -> out (1, inner): silu(gate) * up."""
    assert x.shape[0] == 1, "one row"
    assert weight.shape[0] == 2 * out.shape[1], "gate and up are of one size"
    _launch(x, weight, out, bias, norm, tiles, adds=False, is_paired=True, overlap=overlap)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    tiles: RowTiles,
    *,
    adds: bool,
    is_paired: bool,
    overlap: bool,
) -> None:
    outputs, columns = out.shape[1], weight.shape[1]
    _row_product[(triton.cdiv(outputs, tiles.outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        out,
        outputs,
        columns,
        0.0 if norm is None else norm.eps,
        BLOCK_OUTPUTS=tiles.outputs,
        BLOCK_COLUMNS=tiles.columns,
        NORM_WIDTH=0 if norm is None else triton.next_power_of_2(columns),
        HAS_BIAS=bias is not None,
        ADDS=adds,
        PAIRED=is_paired,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **launch_options(overlap),
    )


@triton.jit
def _inputs(x, norm_weight, column, columns, scale, NORMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some columns of the row, in float32, normed and rounded as the norm's own kernel would write them."""
    inside = column < columns
    value = tl.load(x + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if NORMED:
        weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        wide = (weight * (wide * scale).to(value.dtype).to(tl.float32)).to(value.dtype).to(tl.float32)
    return wide


@triton.jit
def _row_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    norm_weight,
    out,
    outputs,
    columns,
    eps,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NORM_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    PAIRED: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    kept = output < outputs
    row = tl.minimum(output, outputs - 1)  # past the end the last one is read again, and not written
    lane = tl.arange(0, BLOCK_COLUMNS)
    source = weight + row.to(tl.int64)[:, None] * columns + lane[None, :]
    pair = source + outputs.to(tl.int64) * columns
    first_inside = (lane < columns)[None, :]
    first = tl.load(source, mask=first_inside, other=0.0)
    first_pair = first
    if PAIRED:
        first_pair = tl.load(pair, mask=first_inside, other=0.0)
    wait_for_last(OVERLAP)

    scale = 1.0
    if NORM_WIDTH > 0:
        everywhere = tl.arange(0, NORM_WIDTH)
        whole = tl.load(x + everywhere, mask=everywhere < columns, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, axis=0) / columns + eps)
    value = _inputs(x, norm_weight, lane, columns, scale, NORM_WIDTH > 0)[None, :]
    sums = first.to(tl.float32) * value
    pair_sums = sums
    if PAIRED:
        pair_sums = first_pair.to(tl.float32) * value
    for at in tl.range(BLOCK_COLUMNS, columns, BLOCK_COLUMNS, num_stages=STAGES):
        inside = (at + lane < columns)[None, :]
        value = _inputs(x, norm_weight, at + lane, columns, scale, NORM_WIDTH > 0)[None, :]
        sums += tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * value
        if PAIRED:
            pair_sums += tl.load(pair + at, mask=inside, other=0.0).to(tl.float32) * value

    dtype = out.dtype.element_ty
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)
    if PAIRED:
        up = tl.sum(pair_sums, axis=1)
        if HAS_BIAS:
            up += tl.load(bias + outputs + row).to(tl.float32)
        # Rounded where torch's own operators round.
        gate = total.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = activated * up.to(dtype).to(tl.float32)
    if ADDS:
        total = total.to(dtype).to(tl.float32) + tl.load(out + row).to(tl.float32)
    tl.store(out + output, total.to(dtype), mask=kept)
