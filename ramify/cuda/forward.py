"""The decoder's forward pass on fused kernels; no allocation is kept.

several rows, four products, three kernels and an attention a layer:
    norm -> [qkv] -> rope, write -> attention -> [output] -> add, norm -> [gate, up, silu, multiply] -> [down] -> add,
    norm of the next layer

one row, where starting a kernel takes as long as its work, three kernels fewer: norms and residual adds are done by the
products themselves
    [norm, qkv] -> rope, write -> attention -> [output, add] -> [norm, gate, up, silu, multiply] -> [down, add]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.cuda import products
from ramify.kernels.norm import add_rms_norm
from ramify.kernels.overlap import can_overlap
from ramify.kernels.parts import Parts
from ramify.kernels.rope_write import rope_and_write
from ramify.kernels.row_product import Norm, row_gate_up, row_product
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder, Layer
from ramify.models.linear import Linear

# (layer, queries (T, heads, head_dim)) -> (T, heads * head_dim); keys and values lie in the pool already
AttendPool = Callable[[int, Tensor], Tensor]


def forward(
    decoder: Decoder, pool: KVPool, attend: AttendPool, *, token_ids: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """token_ids, positions, slots (T,) -> hidden states after the last norm (T, hidden)."""
    arch = decoder.arch
    residual = F.embedding(token_ids, decoder.embedding)
    queries = residual.new_empty(residual.shape[0], arch.num_heads, arch.head_dim)

    def attention(index: int, layer: Layer, qkv: Parts) -> Tensor:
        rope_and_write(
            qkv,
            positions,
            slots,
            decoder.frequencies,
            arch.rope.attention_factor,
            queries,
            pool.kv[index],
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=arch.rms_norm_eps,
            overlap=can_overlap(queries.device),
        )
        return attend(index, queries)

    if products.has_one_row(residual):
        _one_row(decoder, residual, attention)
        delta = None
    else:
        delta = _several_rows(decoder, residual, attention)
    x = torch.empty_like(residual)
    add_rms_norm(residual, delta, decoder.final_norm, arch.rms_norm_eps, x, overlap=can_overlap(x.device))
    return x


Attention = Callable[[int, Layer, Parts], Tensor]


def _several_rows(decoder: Decoder, residual: Tensor, attention: Attention) -> Parts | None:
    """Grows residual (T, hidden) layer by layer; what the last layer adds is returned."""
    arch, overlap = decoder.arch, can_overlap(residual.device)
    x = torch.empty_like(residual)
    inner = residual.new_empty(residual.shape[0], arch.intermediate_size)
    delta: Parts | None = None
    for index, layer in enumerate(decoder.layers):
        add_rms_norm(residual, delta, layer.input_norm, arch.rms_norm_eps, x, overlap=overlap)
        attended = attention(index, layer, products.product(layer.qkv, x))
        delta = products.product(layer.output, attended)
        add_rms_norm(residual, delta, layer.post_norm, arch.rms_norm_eps, x, overlap=overlap)
        products.gate_up(layer.gate_up, x, inner)
        delta = products.product(layer.down, inner)
    return delta


def _one_row(decoder: Decoder, residual: Tensor, attention: Attention) -> None:
    """Grows residual (1, hidden) layer by layer."""
    arch, overlap = decoder.arch, can_overlap(residual.device)
    inner = residual.new_empty(1, arch.intermediate_size)
    qkv = residual.new_empty(1, decoder.layers[0].qkv.weight.shape[0])

    def add(linear: Linear, x: Tensor) -> None:
        row_product(x, linear.weight, residual, tiles=products.ROW_TILES, bias=linear.bias, adds=True, overlap=overlap)

    for index, layer in enumerate(decoder.layers):
        norm = Norm(layer.input_norm, arch.rms_norm_eps)
        weight, bias = layer.qkv.weight, layer.qkv.bias
        row_product(residual, weight, qkv, tiles=products.ROW_TILES, bias=bias, norm=norm, overlap=overlap)
        add(layer.output, attention(index, layer, Parts.whole(qkv)))
        norm = Norm(layer.post_norm, arch.rms_norm_eps)
        weight, bias = layer.gate_up.weight, layer.gate_up.bias
        row_gate_up(residual, weight, inner, tiles=products.ROW_GATE_UP_TILES, bias=bias, norm=norm, overlap=overlap)
        add(layer.down, inner)


def logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """(R, hidden) -> (R, vocabulary) in float32."""
    return products.head(decoder.head, hidden)
