"""The decoder's forward pass on fused kernels: a layer is four products, four kernels and an attention.

norm -> [qkv] -> rope, write -> attention -> [output] -> add, norm -> [gate, up] -> silu, multiply -> [down] -> add,
norm of the next layer
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.activation import silu_and_multiply
from ramify.kernels.norm import add_rms_norm
from ramify.kernels.rope_write import rope_and_write
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder

# (layer, queries (T, heads, head_dim)) -> (T, heads * head_dim); keys and values lie in the pool already
AttendPool = Callable[[int, Tensor], Tensor]


def forward(
    decoder: Decoder, pool: KVPool, attend: AttendPool, *, token_ids: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """token_ids, positions, slots (T,) -> hidden states after the last norm (T, hidden). No allocation is kept."""
    arch = decoder.arch
    residual = F.embedding(token_ids, decoder.embedding)
    tokens = residual.shape[0]
    x = torch.empty_like(residual)
    queries = residual.new_empty(tokens, arch.num_heads, arch.head_dim)
    inner = residual.new_empty(tokens, arch.intermediate_size)
    norms = [layer.input_norm for layer in decoder.layers[1:]] + [decoder.final_norm]
    add_rms_norm(residual, None, decoder.layers[0].input_norm, arch.rms_norm_eps, x)
    for index, (layer, next_norm) in enumerate(zip(decoder.layers, norms, strict=True)):
        rope_and_write(
            layer.qkv.product(x),
            positions,
            slots,
            decoder.frequencies,
            arch.rope.attention_factor,
            queries,
            pool.kv[index],
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=arch.rms_norm_eps,
        )
        add_rms_norm(residual, layer.output.product(attend(index, queries)), layer.post_norm, arch.rms_norm_eps, x)
        silu_and_multiply(layer.gate_up.product(x), inner)
        add_rms_norm(residual, layer.down.product(inner), next_norm, arch.rms_norm_eps, x)
    return x


def logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """(R, hidden) -> (R, vocabulary) in float32, summed and written in float32 whatever the model's precision."""
    if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
        return torch.mm(hidden, decoder.head.weight.t(), out_dtype=torch.float32)
    return decoder.logits(hidden)
