"""The decoder's forward pass on the CPU's own kernels: models/decoder.py with fused operators and reused buffers.

A layer is four products, three passes over rows, and attention:
    norm -> [qkv] -> rotate, write -> attention -> [output, add] -> norm -> [gate, up, silu, multiply] -> [down, add]

Of a model that ranks share, output and down give each a part of the sum; adding is then a pass of its own.

Once the last layer's keys and values are written, only rows whose hidden states are asked for go on: of a prompt, its
last.

All but attention does the same for a row whatever rows there are beside it; with `batch_invariant` attention does too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.cpu.attention_items import NO_SHARING, SHARING, CpuAttention
from ramify.cpu.library import Library
from ramify.cpu.panels import Ending, PanelPacking, Panels, Product
from ramify.device.layers import Batch, Layers, TorchLayers
from ramify.device.pool import KVPool
from ramify.device.reads import Reads, SharingRule
from ramify.models.decoder import Decoder, Layer


class _Products:
    def __init__(self, packing: PanelPacking, layer: Layer, *, batch_invariant: bool) -> None:
        self.layer = layer
        self.qkv = packing.product(layer.qkv, batch_invariant=batch_invariant)
        self.output = packing.product(layer.output, batch_invariant=batch_invariant)
        self.gate_up = packing.product(layer.gate_up, gated=True, batch_invariant=batch_invariant)
        self.down = packing.product(layer.down, batch_invariant=batch_invariant)


class CpuLayers:
    """float32 on a CPU, for a decoder whose weights are in panels."""

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        pool: KVPool,
        sharing: SharingRule = SHARING,
        *,
        batch_invariant: bool = False,
    ) -> None:
        assert isinstance(decoder.packing, PanelPacking), "the decoder's weights must be in panels"
        self.decoder = decoder
        self.pool = pool
        self.device = decoder.device
        self.vocab_size = decoder.arch.vocab_size
        self.sharing = NO_SHARING if batch_invariant else sharing
        self._library = library
        self._attention = CpuAttention(library, pool, decoder.arch.num_heads, alike=batch_invariant)
        self._layers = [_Products(decoder.packing, layer, batch_invariant=batch_invariant) for layer in decoder.layers]
        self._head = decoder.packing.product(decoder.head, batch_invariant=batch_invariant)
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # each, and the rows of it that were used last

    def prepare(self, reads: Reads) -> None:
        self._reads = reads
        self._whole = self._attention.items(reads)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Batch of T rows -> hidden states after the last norm (R, hidden)."""
        decoder, arch, total = self.decoder, self.decoder.arch, len(batch.token_ids)
        angles = batch.positions.float()[:, None] * decoder.frequencies  # (T, head_dim / 2)
        rotations = (angles.cos() * arch.rope.attention_factor, angles.sin() * arch.rope.attention_factor)

        residual = self._buffer("residual", total, arch.hidden_size)
        if decoder.ranks is None:
            embedding = decoder.table.parts[0]
            assert isinstance(embedding, Panels)
            embedding.rows(batch.token_ids, out=residual)
        else:
            residual.copy_(decoder.embed(batch.token_ids))
        qkv = self._buffer("qkv", total, arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim)
        attended = self._buffer("attended", total, arch.num_heads * arch.head_dim)
        for index, products in enumerate(self._layers):
            x = self._norm(residual, products.layer.input_norm)
            products.qkv.multiply(x, qkv)
            self._rotate_and_write(index, qkv, rotations, batch.slots)
            if index == arch.num_layers - 1 and rows is not None:
                if not len(rows):
                    return residual[:0]
                self._attention.attend(self._attention.items(self._reads.of_rows(rows.tolist())), index, qkv, attended)
                residual, attended = residual[rows], attended[rows]
            else:
                self._attention.attend(self._whole, index, qkv, attended)
            self._add(products.output, attended, residual)
            x = self._norm(residual, products.layer.post_norm)
            inner = self._buffer("inner", x.shape[0], arch.intermediate_size)
            products.gate_up.multiply(x, inner, Ending.GATED)
            self._add(products.down, inner, residual)
        return self._norm(residual, decoder.final_norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """(R, hidden) -> (R, vocabulary)"""
        ranks = self.decoder.ranks
        if ranks is not None:
            own = torch.empty(hidden.shape[0], len(self.decoder.shard.vocabulary))
            self._head.multiply(hidden.contiguous(), own)
            gathered = ranks.gather(own, self.vocab_size)
            return gathered if out is None else out.copy_(gathered)
        logits = torch.empty(hidden.shape[0], self.vocab_size) if out is None else out
        self._head.multiply(hidden.contiguous(), logits)
        return logits

    def _add(self, product: Product, x: Tensor, residual: Tensor) -> None:
        """residual (T, hidden) grows by the product of x (T, columns)."""
        ranks = self.decoder.ranks
        if ranks is None:
            product.multiply(x, residual, Ending.ADD)
            return
        part = self._buffer("part", *residual.shape)
        product.multiply(x, part)
        residual += ranks.add_up(part)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In a buffer that the next norm will write to."""
        out = self._buffer("norm", *x.shape)
        epsilon, threads = self.decoder.arch.rms_norm_eps, self._library.threads
        self._library.norm(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), *x.shape, threads)
        return out

    def _rotate_and_write(self, index: int, qkv: Tensor, rotations: tuple[Tensor, Tensor], slots: Tensor) -> None:
        """Queries are rotated in place; keys, rotated, and values, as they are, go to their slots in the pool."""
        arch, layer = self.decoder.arch, self.decoder.layers[index]
        cosines, sines = rotations
        self._library.rotate_and_write(
            qkv.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            None if layer.query_norm is None else layer.query_norm.data_ptr(),
            None if layer.key_norm is None else layer.key_norm.data_ptr(),
            arch.rms_norm_eps,
            slots.data_ptr(),
            self.pool.layers[index].data_ptr(),
            qkv.shape[0],
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            self._library.threads,
        )

    def _buffer(self, name: str, rows: int, *shape: int) -> Tensor:
        """Kept from step to step: fresh memory would be mapped anew, page by page."""
        buffer, part = self._buffers.get(name, (None, None))
        if buffer is None or buffer.shape[0] < rows:
            buffer, part = torch.empty(rows, *shape), None
        if part is None or part.shape[0] != rows:  # mostly there are as many as the last time
            part = buffer[:rows]
            self._buffers[name] = buffer, part
        return part


def cpu_layers(decoder: Decoder, pool: KVPool, *, batch_invariant: bool = False) -> Layers:
    """On these kernels where the decoder's weights are in panels, else on torch's operators."""
    if isinstance(decoder.packing, PanelPacking):
        return CpuLayers(decoder.packing.library, decoder, pool, batch_invariant=batch_invariant)
    return TorchLayers(decoder, pool)
