"""One decoder for Llama, Qwen2 and Qwen3: what differs between them is in the Architecture.

Nothing is hidden: whoever calls `forward` hands in tokens, positions and the attention to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.models.families import Architecture
from ramify.models.linear import Linear, Packing, may_pack
from ramify.models.rope import Rotations, inverse_frequencies, rotate
from ramify.models.shards import Ranks, Shard

# (layer, queries (T, heads, head_dim), keys and values (T, kv_heads, head_dim)) -> (T, heads * head_dim)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer:
    """The tensors of one layer; queries, keys and values are one product, gate and up another."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, *, packed: bool) -> None:
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        hidden, inner = arch.hidden_size, arch.intermediate_size

        def linear(rows: int, columns: int, bias: bool) -> Linear:
            return Linear.empty(rows, columns, bias=bias, dtype=dtype, device=device, packed=packed)

        def norm(size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.input_norm = norm(hidden)
        self.qkv = linear(queries + 2 * keys, hidden, arch.qkv_bias)
        self.query_norm = norm(arch.head_dim) if arch.qk_norm else None
        self.key_norm = norm(arch.head_dim) if arch.qk_norm else None
        self.output = linear(hidden, queries, arch.output_bias)
        self.post_norm = norm(hidden)
        self.gate_up = linear(2 * inner, hidden, arch.mlp_bias)
        self.down = linear(hidden, inner, arch.mlp_bias)
        self.linears = (self.qkv, self.output, self.gate_up, self.down)


class Decoder:
    """Token ids to hidden states to logits. Parameters are uninitialised until `weights.fill` has run.

    With a packing, matrices are held by whoever packs them (`Linear.parts`) and nowhere else: such a decoder computes
    nothing itself, its layers run on that one's kernels.

    Of a model that ranks share, this is one rank's part, and `arch` is what it computes: its own heads and its own part
    of the MLP. The vocabulary there is the whole one.
    """

    def __init__(
        self,
        arch: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.shard = Shard(arch, 0, 1) if ranks is None else Shard(arch, ranks.rank, ranks.size)
        self.arch = arch = self.shard.local
        self.dtype = dtype
        self.device = device
        self.packing = packing
        packed = packing is not None
        shape = (len(self.shard.vocabulary), arch.hidden_size)
        self.table = Linear.empty(*shape, bias=False, dtype=dtype, device=device, packed=packed)
        self.layers = [Layer(arch, dtype, device, packed=packed) for _ in range(arch.num_layers)]
        self.final_norm = torch.empty(arch.hidden_size, dtype=dtype, device=device)
        self.head = self.table if arch.tie_embeddings else Linear(torch.empty_like(self.table.weight))
        self.frequencies = inverse_frequencies(arch.rope, arch.head_dim).to(device)
        if not packed:
            num_bytes = self.shard.size * self.num_bytes
            for linear in linears(self):
                linear.may_pack = may_pack(linear.weight, num_bytes)

    @property
    def embedding(self) -> Tensor:
        return self.table.weight

    @property
    def num_bytes(self) -> int:
        """What the weights take."""
        held = sum(part.num_bytes for linear in linears(self) for part in linear.parts.values())
        dense = (tensor for _, tensor in parameters(self) if self.packing is None or tensor.device.type != "meta")
        return held + sum(tensor.numel() * tensor.itemsize for tensor in dense)

    @property
    def quantised_formats(self) -> list[str]:
        """The names of the formats of weights that are held quantised."""
        parts = [part for linear in linears(self) for part in linear.parts.values()]
        return sorted({part.stored_in.name for part in parts if part.stored_in.block_size > 1})

    @property
    def holds_integers(self) -> bool:
        """Whether some weights are held as integers with scales."""
        return any(part.stored_in.holds_integers for linear in linears(self) for part in linear.parts.values())

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions (T,) -> hidden states after the last norm (T, hidden)."""
        rotations = self._rotations(positions)
        residual = self.embed(token_ids)
        for index, layer in enumerate(self.layers):
            x = self._norm(residual, layer.input_norm)
            queries, keys, values = self._qkv(layer, x, rotations)
            residual.add_(self._added_up(layer.output.product(attend(index, queries, keys, values))))
            x = self._norm(residual, layer.post_norm)
            gate, up = layer.gate_up.product(x).chunk(2, dim=-1)
            residual.add_(self._added_up(layer.down.product(F.silu(gate).mul_(up))))
        return self._norm(residual, self.final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden) -> (R, vocabulary) float32."""
        logits = self.head.product(hidden).float().contiguous()
        return logits if self.ranks is None else self.ranks.gather(logits, self.arch.vocab_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids (T,) -> (T, hidden). Each token's row is held by one rank, the others add zeros."""
        if self.ranks is None:
            return F.embedding(token_ids, self.embedding)
        own = token_ids - self.shard.vocabulary.start
        is_ours = (own >= 0) & (own < len(self.shard.vocabulary))
        near = torch.where(is_ours, own, 0)
        found = F.embedding(near, self.embedding) if self.packing is None else self.table.parts[0].rows(near)
        return self.ranks.add_up(torch.where(is_ours[:, None], found, 0))

    def _added_up(self, product: Tensor) -> Tensor:
        """Of ranks, each has the sum over its own columns."""
        return product if self.ranks is None else self.ranks.add_up(product.contiguous())

    def _qkv(self, layer: Layer, x: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor, Tensor]:
        arch = self.arch
        packed = layer.qkv.product(x).contiguous().view(x.shape[0], -1, arch.head_dim)  # heads must lie in one piece
        unrotated, values = packed[:, : -arch.num_kv_heads], packed[:, -arch.num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = unrotated[:, : arch.num_heads], unrotated[:, arch.num_heads :]
            unrotated = torch.cat((self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)), dim=1)
        rotated = rotate(unrotated, rotations)  # queries and keys at once
        return rotated[:, : arch.num_heads], rotated[:, arch.num_heads :], values

    def _rotations(self, positions: Tensor) -> Rotations:
        angles = positions.float()[:, None, None] * self.frequencies  # (T, 1, head_dim / 2)
        scale = self.arch.rope.attention_factor
        cosines, sines = (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)
        return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, its mean square taken in float32 whatever the model's precision."""
        if x.dtype is torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.arch.rms_norm_eps)
        return weight * F.rms_norm(x.float(), weight.shape, eps=self.arch.rms_norm_eps).to(x.dtype)


def linears(decoder: Decoder) -> list[Linear]:
    """All matrices; a head that is the embedding counts once."""
    heads = [decoder.head] if decoder.head is decoder.table else [decoder.table, decoder.head]
    return [*heads, *(linear for layer in decoder.layers for linear in layer.linears)]


class Parameter(NamedTuple):
    """A parameter, and the rows of a matrix that it is if it is some."""

    tensor: Tensor
    matrix: Linear | None = None
    first_row: int = 0


def parameters(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its canonical (Hugging Face) name, as the part of the joined tensor where it belongs."""
    return ((name, parameter.tensor) for name, parameter in places(decoder))


def places(decoder: Decoder) -> Iterator[tuple[str, Parameter]]:
    """The same, each with the matrix that holds it."""
    arch = decoder.arch
    yield "model.embed_tokens.weight", Parameter(decoder.embedding, decoder.table)
    query_rows, key_rows = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv = {"q": query_rows, "k": key_rows, "v": key_rows}
    halves = {"gate": arch.intermediate_size, "up": arch.intermediate_size}
    for index, layer in enumerate(decoder.layers):
        name = f"model.layers.{index}"
        yield f"{name}.input_layernorm.weight", Parameter(layer.input_norm)
        yield from _joined(f"{name}.self_attn.{{}}_proj", layer.qkv, qkv)
        if layer.query_norm is not None and layer.key_norm is not None:
            yield f"{name}.self_attn.q_norm.weight", Parameter(layer.query_norm)
            yield f"{name}.self_attn.k_norm.weight", Parameter(layer.key_norm)
        yield from _joined(f"{name}.self_attn.{{}}_proj", layer.output, {"o": arch.hidden_size})
        yield f"{name}.post_attention_layernorm.weight", Parameter(layer.post_norm)
        yield from _joined(f"{name}.mlp.{{}}_proj", layer.gate_up, halves)
        yield from _joined(f"{name}.mlp.{{}}_proj", layer.down, {"down": arch.hidden_size})
    yield "model.norm.weight", Parameter(decoder.final_norm)
    if not arch.tie_embeddings:
        yield "lm_head.weight", Parameter(decoder.head.weight, decoder.head)


def _joined(pattern: str, linear: Linear, rows: dict[str, int]) -> Iterator[tuple[str, Parameter]]:
    start = 0
    for part, count in rows.items():
        yield f"{pattern.format(part)}.weight", Parameter(linear.weight[start : start + count], linear, start)
        if linear.bias is not None:
            yield f"{pattern.format(part)}.bias", Parameter(linear.bias[start : start + count])
        start += count
