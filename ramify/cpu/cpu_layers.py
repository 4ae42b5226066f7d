"""The decoder's forward pass on the CPU's own kernels: models/decoder.py with fused operators and reused buffers.

A layer is four products, three passes over rows, and attention:
    norm -> [qkv] -> rotate, write -> attention -> [output, add] -> norm -> [gate, up, silu, multiply] -> [down, add]
          WRITE                        ATTEND        OUTPUT                     MLP

All layers are one call for few rows (layers.cpp): a small model's kernels take some microseconds, which a call from
Python takes too. Of a model that ranks share, output and down give each a part of the sum, which is added up between
two calls.

Once the last layer's keys and values are written, only rows whose hidden states are asked for go on: of a prompt, its
last.

All but attention does the same for a row whatever rows there are beside it; with `batch_invariant` attention does too.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from ramify.cpu.attention_items import NO_SHARING, SHARING, CpuAttention
from ramify.cpu.library import Library, floats
from ramify.cpu.panels import PanelPacking, Panels
from ramify.cpu.structures import LayerFields, LayersFields, PassFields, Stage
from ramify.device.layers import Batch, Layers, TorchLayers
from ramify.device.pool import KVPool
from ramify.device.reads import Reads, SharingRule
from ramify.models.decoder import Decoder, Layer

ROWS_IN_ONE_CALL = 64  # with more, kernels are long, and Ctrl-C need not wait for all of a prompt


class _Products:
    def __init__(self, packing: PanelPacking, layer: Layer, *, batch_invariant: bool) -> None:
        self.layer = layer
        self.qkv = packing.product(layer.qkv, batch_invariant=batch_invariant)
        self.output = packing.product(layer.output, batch_invariant=batch_invariant)
        self.gate_up = packing.product(layer.gate_up, gated=True, batch_invariant=batch_invariant)
        self.down = packing.product(layer.down, batch_invariant=batch_invariant)

    def fields(self, pool: Tensor) -> LayerFields:
        norms = (self.layer.input_norm, self.layer.post_norm, self.layer.query_norm, self.layer.key_norm)
        return LayerFields(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            pool.data_ptr(),
            *(product.fields() for product in (self.qkv, self.output, self.gate_up, self.down)),
        )


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
        self._memory = decoder.packing.memory
        self._attention = CpuAttention(library, pool, decoder.arch.num_heads, alike=batch_invariant)
        self._layers = [_Products(decoder.packing, layer, batch_invariant=batch_invariant) for layer in decoder.layers]
        self._linears = [linear for layer in decoder.layers for linear in layer.linears]
        self._head = decoder.packing.product(decoder.head, batch_invariant=batch_invariant)
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # each, and the rows of it that were used last
        self._fields = LayersFields()
        self._made_of = -1

    def prepare(self, reads: Reads) -> None:
        self._reads = reads
        self._whole = self._attention.items(reads)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Batch of T rows -> hidden states after the last norm (R, hidden)."""
        decoder, arch, total = self.decoder, self.decoder.arch, len(batch.token_ids)
        angles = batch.positions.float()[:, None] * decoder.frequencies  # (T, head_dim / 2)
        cosines, sines = angles.cos() * arch.rope.attention_factor, angles.sin() * arch.rope.attention_factor

        residual = self._buffer("residual", total, arch.hidden_size)
        if decoder.ranks is None:
            embedding = decoder.table.parts[0]
            assert isinstance(embedding, Panels)
            embedding.rows(batch.token_ids, out=residual)
        else:
            residual.copy_(decoder.embed(batch.token_ids))
        qkv = self._buffer("qkv", total, arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim)
        attended = self._buffer("attended", total, arch.num_heads * arch.head_dim)
        self._read_weights()
        step = PassFields(
            threads=self._library.threads,
            qkv=qkv.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            slots=batch.slots.data_ptr(),
        )
        self._set_rows(step, residual, attended)
        self._attention.put(step, self._whole, attended)
        end = len(self._layers) * len(Stage)
        if rows is None:
            self._run(step, residual, 0, end)
            return self._norm(residual, decoder.final_norm)
        last = end - len(Stage)
        self._run(step, residual, 0, last + Stage.ATTEND)
        if not len(rows):
            return residual[:0]
        chosen = self._attention.items(self._reads.of_rows(rows.tolist()))
        self._attention.put(step, chosen, attended)
        self._run(step, residual, last + Stage.ATTEND, last + Stage.OUTPUT)
        residual, attended = residual[rows], attended[rows]
        self._set_rows(step, residual, attended)
        self._run(step, residual, last + Stage.OUTPUT, end)
        return self._norm(residual, decoder.final_norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """(R, hidden) -> (R, vocabulary)"""
        ranks = self.decoder.ranks
        if ranks is not None:
            own = floats(hidden.shape[0], len(self.decoder.shard.vocabulary))
            self._head.multiply(hidden.contiguous(), own)
            gathered = ranks.gather(own, self.vocab_size)
            return gathered if out is None else out.copy_(gathered)
        if out is None:
            out = floats(hidden.shape[0], self.vocab_size)
        self._head.multiply(hidden.contiguous(), out)
        return out

    def _set_rows(self, step: PassFields, residual: Tensor, attended: Tensor) -> None:
        """What goes through products."""
        rows = residual.shape[0]
        step.rows = rows
        step.residual, step.attended = residual.data_ptr(), attended.data_ptr()
        step.normed = self._buffer("norm", *residual.shape).data_ptr()
        step.inner = self._buffer("inner", rows, self.decoder.arch.intermediate_size).data_ptr()
        step.memory = self._memory.address(self._library.layers_memory(ctypes.byref(self._fields), rows))

    def _run(self, step: PassFields, residual: Tensor, begin: int, end: int) -> None:
        """Stages begin .. end, counted from the first of the first layer; residual grows."""
        ranks, layers, told = self.decoder.ranks, ctypes.byref(self._fields), ctypes.byref(step)
        if ranks is None:
            at_once = end - begin if step.rows <= ROWS_IN_ONE_CALL else 1
            for stage in range(begin, end, at_once):
                self._library.run_stages(layers, told, stage, min(stage + at_once, end))
            return
        part = self._buffer("part", *residual.shape)
        step.added = part.data_ptr()
        for stage in range(begin, end):
            self._library.run_stages(layers, told, stage, stage + 1)
            if stage % len(Stage) in (Stage.OUTPUT, Stage.MLP):
                residual += ranks.add_up(part)

    def _read_weights(self) -> None:
        """Where they are, if one has been packed again."""
        made_of = sum(linear.times_packed for linear in self._linears)
        if self._made_of == made_of:
            return
        arch = self.decoder.arch
        layers = [each.fields(pool) for each, pool in zip(self._layers, self.pool.layers, strict=True)]
        self._fields = LayersFields(
            (LayerFields * len(layers))(*layers),
            len(layers),
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            self.pool.block_size,
            arch.rms_norm_eps,
        )
        self._made_of = made_of

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In a buffer that the next norm will write to."""
        out = self._buffer("norm", *x.shape)
        epsilon, threads = self.decoder.arch.rms_norm_eps, self._library.threads
        self._library.norm(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), *x.shape, threads)
        return out

    def _buffer(self, name: str, rows: int, *shape: int) -> Tensor:
        """Kept from step to step: fresh memory would be mapped anew, page by page."""
        buffer, part = self._buffers.get(name, (None, None))
        if buffer is None or buffer.shape[0] < rows:
            buffer, part = floats(rows, *shape), None
        if part is None or part.shape[0] != rows:  # mostly there are as many as the last time
            part = buffer[:rows]
            self._buffers[name] = buffer, part
        return part


def cpu_layers(decoder: Decoder, pool: KVPool, *, batch_invariant: bool = False) -> Layers:
    """On these kernels where the decoder's weights are in panels, else on torch's operators."""
    if isinstance(decoder.packing, PanelPacking):
        return CpuLayers(decoder.packing.library, decoder, pool, batch_invariant=batch_invariant)
    return TorchLayers(decoder, pool)
