"""The decoder's forward pass on the GPU's kernels.

several rows, four products, three kernels and an attention a layer:
    norm -> [qkv] -> rope, write -> attention -> [output] -> add, norm -> [gate, up, silu, multiply] -> [down] -> add,
    norm of the next layer

one row, three kernels fewer (products.py):
    [norm, qkv] -> rope, write -> attention -> [output, add] -> [norm, gate, up, silu, multiply] -> [down, add]

Single rows (decodes) and pieces of prompts attend over lists whose lengths the device knows, so that a graph of
`forward` stays valid. Once the last layer's keys and values are written, only rows whose hidden states are asked for go
on: of a prompt, its last one.

With `batch_invariant` a row's hidden states have the same bits in any company: products by one family of kernels for
any number of rows (invariant_products.py), decodes, shared prefixes and pieces of prompts in the same parts with the
same bits (kernels/walk.py, kernels/stretches.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ramify.device.layers import Batch
from ramify.device.pool import KVPool
from ramify.device.reads import Reads, SharingRule
from ramify.errors import UnsupportedError, UnsupportedModelError
from ramify.gpu.exact_prompts import ExactPrompts
from ramify.gpu.followers import Followers
from ramify.gpu.form_cache import FormCache
from ramify.gpu.invariant_products import InvariantWeight
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.rope_write import rope_and_write
from ramify.gpu.kernels.row_product import Norm
from ramify.gpu.kernels.stretches import EvenCuts, PositionCuts
from ramify.gpu.kernels.walk import EXACT_BLOCK_M
from ramify.gpu.paces import LayerShape, MeasuredPace
from ramify.gpu.packed_parts import settle
from ramify.gpu.packed_weight import PackedWeight
from ramify.gpu.paged import PagedDecode
from ramify.gpu.product_forms import Pace, Role
from ramify.gpu.products import Stream, Weight, dense_weights
from ramify.gpu.prompts import PagedPrompts
from ramify.gpu.shared_weight import SharedWeight
from ramify.gpu.tables import DeviceTables
from ramify.gpu.tuning import GraphStopwatch
from ramify.models.decoder import Decoder, Layer
from ramify.models.families import Architecture
from ramify.models.linear import Linear

# Fewer positions are read again sooner than a second kernel starts.
SHARING = SharingRule(fewest_positions=512, prompts=False)
HEAD_DIMS = (16, 32, 64, 128, 256)  # tiles are powers of two


class _Layer:
    def __init__(self, layer: Layer, eps: float, weights: tuple[Weight, Weight, Weight, Weight]) -> None:
        self.input_norm, self.post_norm = Norm(layer.input_norm, eps), Norm(layer.post_norm, eps)
        self.query_norm, self.key_norm = layer.query_norm, layer.key_norm
        self.qkv, self.output, self.gate_up, self.down = weights


class GpuLayers:
    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        *,
        max_rows: int,
        max_model_len: int,
        sharing: SharingRule = SHARING,
        batch_invariant: bool = False,
        forms: FormCache | None = None,
        unproven_paces: bool = False,
    ) -> None:
        arch = decoder.arch
        _check_heads(arch)
        if batch_invariant:
            _check_invariant(arch, decoder.dtype)
        settle(decoder)
        self._cuts = PositionCuts(max_model_len) if batch_invariant else None
        self.decoder = decoder
        self.pool = pool
        self.device = decoder.device
        self.vocab_size = arch.vocab_size
        self.sharing = sharing
        if self._cuts is not None:
            self.sharing = replace(sharing, most_blocks=self._cuts.largest_prefix)

        def weights_of(role: Role, linears: list[Linear]) -> list[Weight]:
            if batch_invariant:  # whose bits depend on no measurement
                return [InvariantWeight(linear) for linear in linears]
            dense = iter(dense_weights(role, [linear for linear in linears if not linear.parts], forms))
            return [PackedWeight(linear) if linear.parts else next(dense) for linear in linears]

        def added(linears: list[Linear]) -> list[Weight]:
            own, ranks = weights_of("added", linears), decoder.ranks
            return own if ranks is None else [SharedWeight(weight, ranks) for weight in own]

        layers = decoder.layers
        self._pace = Pace(int(can_overlap(decoder.device)))
        self._paces: MeasuredPace | None = None
        if self._pace.overlaps and forms is not None and not batch_invariant and decoder.ranks is None:
            stopwatch = GraphStopwatch(decoder.device)
            self._paces = MeasuredPace(LayerShape.of(decoder), forms, stopwatch.seconds, unproven=unproven_paces)
        weights = zip(
            weights_of("read", [layer.qkv for layer in layers]),
            added([layer.output for layer in layers]),
            weights_of("gate_up", [layer.gate_up for layer in layers]),
            added([layer.down for layer in layers]),
            strict=True,
        )
        self._layers = [_Layer(layer, arch.rms_norm_eps, own) for layer, own in zip(layers, weights, strict=True)]
        self._final_norm = Norm(decoder.final_norm, arch.rms_norm_eps)
        self._head = weights_of("head", [decoder.head])[0]
        self._decodes = PagedDecode(
            max_rows=max_rows,
            max_parts=max_rows * (EvenCuts.most_parts(max_model_len) if self._cuts is None else self._cuts.most_parts),
            max_blocks=-(-max_model_len // pool.block_size),
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            block_size=pool.block_size,
            dtype=decoder.dtype,
            device=decoder.device,
            cuts=self._cuts,
            exact=batch_invariant,
        )
        self._tables = DeviceTables(self._decodes.tables)
        self._followers = Followers(self._decodes.tables, pool)
        self._paged_prompts = PagedPrompts(
            max_chunks=max_rows,
            max_blocks=-(-max_model_len // pool.block_size),
            queries_per_row=arch.num_heads // arch.num_kv_heads,
            block_size=pool.block_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._exact_prompts: ExactPrompts | None = None
        self._max_rows = max_rows
        self._num_decodes, self._has_prompts, self._has_shared = 0, False, False

    def prepare(self, reads: Reads) -> None:
        if reads.followed is not None:
            self._followers.follow(reads.followed)
        self._tables.follow(reads)
        self._num_decodes, self._has_shared = reads.num_singles, bool(reads.shared)
        self._has_prompts = reads.num_singles < reads.size
        self._decodes.write_list(self._decodes.work_list(reads))
        self._exact_prompts = None
        if self._has_prompts and self._cuts is not None:
            self._exact_prompts = ExactPrompts(reads, self._cuts)
        elif self._has_prompts:
            self._paged_prompts.write_list(reads)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Batch of T rows -> hidden states after the last norm (R, hidden)."""
        pace = self._pace
        if self._paces is not None and not self._has_prompts:
            launch = partial(self._run_some, batch)
            pace = self._paces.of(len(batch.token_ids), launch, is_shared=self._has_shared)
        stream = self._run(batch, rows, len(self._layers), pace)
        return stream.values if rows is not None and not len(rows) else stream.normed(self._final_norm)

    def _run_some(self, batch: Batch, num_layers: int, pace: Pace) -> None:
        """They write what the whole pass will write again."""
        self._run(batch, None, num_layers, pace)

    def _run(self, batch: Batch, rows: Tensor | None, num_layers: int, pace: Pace) -> Stream:
        """The first layers, over a batch of T rows; the last one of all goes on with some rows."""
        arch = self.decoder.arch
        embedded = self.decoder.embed(batch.token_ids)
        stream, total = Stream(embedded, pace), embedded.shape[0]
        queries = embedded.new_empty(total, arch.num_heads, arch.head_dim)
        inner = embedded.new_empty(total, arch.intermediate_size)
        for index, layer in enumerate(self._layers[:num_layers]):
            qkv = layer.qkv.from_stream(stream, layer.input_norm)
            self._rotate_and_write(index, qkv, batch, queries, stream.pace)
            attended = self._attend(index, queries, stream.pace)
            if index == len(self._layers) - 1 and rows is not None:
                stream = Stream(stream.values[rows], pace)
                attended, inner = attended[rows], inner[: len(rows)]
                if not len(rows):
                    return stream
            layer.output.into_stream(attended, stream)
            layer.gate_up.gated_from_stream(stream, layer.post_norm, inner)
            layer.down.into_stream(inner, stream)
        return stream

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """(R, hidden) -> (R, vocabulary) in float32."""
        if out is None:
            out = torch.empty(hidden.shape[0], self.vocab_size, dtype=torch.float32, device=hidden.device)
        ranks = self.decoder.ranks
        if ranks is None:
            self._head.logits(hidden, out)
            return out
        own = out.new_empty(hidden.shape[0], len(self.decoder.shard.vocabulary))
        self._head.logits(hidden, own)
        return out.copy_(ranks.gather(own, self.vocab_size))

    def _rotate_and_write(self, index: int, qkv: Parts, batch: Batch, queries: Tensor, pace: Pace) -> None:
        """Rotated queries to their buffer, rotated keys and values to the pool."""
        arch, layer = self.decoder.arch, self._layers[index]
        rope_and_write(
            qkv,
            batch.positions,
            batch.slots,
            self.decoder.frequencies,
            arch.rope.attention_factor,
            queries,
            self.pool.layers[index],
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=arch.rms_norm_eps,
            ahead=layer.gate_up.ahead(len(queries), pace),
            overlap=bool(pace.overlaps),
        )

    def _attend(self, index: int, queries: Tensor, pace: Pace) -> Tensor:
        """(T, heads, head_dim) -> (T, heads * head_dim): decodes, then pieces of prompts."""
        kv = self.pool.layers[index]
        out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        if self._exact_prompts is not None:
            count = self._num_decodes
            out[count:] = self._exact_prompts.attend(queries[count:], kv)
        else:
            # Which of the first rows are decodes, the list knows; the others come to zero, and prompts write over them.
            count = queries.shape[0] if not self._has_prompts else min(queries.shape[0], self._max_rows)
        if count:
            company = {"with_prefix": self._has_shared, "beside_prompts": self._has_prompts}
            how = {"overlap": bool(pace.overlaps), "reads_early": bool(pace.reads_early)}
            self._decodes.attend(queries[:count], kv, out[:count], **company, **how)
        if self._has_prompts and self._exact_prompts is None:
            self._paged_prompts.attend(queries, kv, out)
        return out


def _check_heads(arch: Architecture) -> None:
    """Refuses what the kernels of attention have no tiles for."""
    if arch.head_dim not in HEAD_DIMS:
        raise UnsupportedModelError(
            f"on a GPU a head has {', '.join(map(str, HEAD_DIMS))} dimensions; this model's have {arch.head_dim} "
            "(device='cpu' serves them)"
        )


def _check_invariant(arch: Architecture, dtype: torch.dtype) -> None:
    """Refuses what would not have the same bits in every batch, or what the exact kernels have no tiles for."""
    queries_per_row, most = arch.num_heads // arch.num_kv_heads, EXACT_BLOCK_M[dtype.itemsize]
    if queries_per_row > most:
        raise UnsupportedError(
            f"batch_invariant on a GPU takes up to {most} query heads for each key-value head in "
            f"{str(dtype).removeprefix('torch.')}; this model has {queries_per_row}"
        )
    if arch.hidden_size % 16:  # the compiler knows of multiples, and rows times hidden would be one or not
        raise UnsupportedError(
            f"batch_invariant on a GPU needs a hidden size that is a multiple of 16; this model's is {arch.hidden_size}"
        )
