"""The decoder's forward pass on the CPU's own kernels: models/decoder.py, fused and into buffers that are kept.

a layer, four products, three passes over rows and an attention:
    norm -> [qkv] -> turn, keep -> attention -> [output, add] -> norm -> [gate, up, silu, multiply] -> [down, add]

After the last layer's keys and values only the rows go on whose hidden states are asked for: of a prompt, its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ramify.attention.slots import slots_of
from ramify.kv.pool import KVPool
from ramify.models.decoder import Decoder, Layer
from ramify.native.attention import FEWEST_SHARED_TOKENS, AttentionWork, NativeAttention
from ramify.native.library import Library
from ramify.native.products import Ending, PackedLinear
from ramify.plan import Chunk, Plan, SharedPrefix, Work


class _PackedLayer:
    def __init__(self, library: Library, layer: Layer) -> None:
        self.layer = layer
        self.qkv = PackedLinear(library, layer.qkv)
        self.output = PackedLinear(library, layer.output)
        self.gate_up = PackedLinear(library, layer.gate_up, gated=True)
        self.down = PackedLinear(library, layer.down)


class NativeLayers:
    """float32 on a CPU. Weights are packed here and now, so that no request waits for it, or fails for memory."""

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        pool: KVPool,
        fewest_shared_tokens: int = FEWEST_SHARED_TOKENS,
    ) -> None:
        self._library = library
        self._decoder = decoder
        self._pool = pool
        self._attention = NativeAttention(library, pool, decoder.arch.num_heads, fewest_shared_tokens)
        self._layers = [_PackedLayer(library, layer) for layer in decoder.layers]
        self._head = PackedLinear(library, decoder.head)
        self._buffers: dict[str, Tensor] = {}
        for packed in self._layers:
            for linear in (packed.qkv, packed.output, packed.gate_up, packed.down):
                linear.pack()
        self._head.pack()

    def hidden(self, work: Plan | Work, token_ids: Tensor, positions: Tensor, rows: Sequence[int]) -> Tensor:
        """token_ids, positions (T,), chunk by chunk -> hidden states after the last norm (len(rows), hidden)."""
        chunks, shared = work.chunks, work.shared
        decoder, arch, total = self._decoder, self._decoder.arch, len(token_ids)
        starts = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))[:-1]
        size = self._pool.block_size
        slots = torch.from_numpy(np.concatenate([slots_of(chunk, size, chunk.start) for chunk in chunks]))
        whole = self._attention.work(chunks, starts, shared)
        angles = positions.float()[:, None] * decoder.frequencies  # (T, head_dim / 2)
        turns = (angles.cos() * arch.rope.attention_factor, angles.sin() * arch.rope.attention_factor)

        residual = self._buffer("residual", total, arch.hidden_size)
        torch.index_select(decoder.embedding, 0, token_ids, out=residual)
        qkv = self._buffer("qkv", total, arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim)
        attended = self._buffer("attended", total, arch.num_heads * arch.head_dim)
        for index, packed in enumerate(self._layers):
            x = self._norm(residual, packed.layer.input_norm)
            packed.qkv.multiply(x, qkv)
            self._turn_and_keep(index, qkv, turns, slots)
            if index == arch.num_layers - 1 and len(rows) < total:
                if not rows:
                    return residual[:0]
                self._attention.attend(self._work_of(rows, chunks, starts, shared), index, qkv, attended)
                selected = torch.tensor(rows)
                residual, attended = residual[selected], attended[selected]
            else:
                self._attention.attend(whole, index, qkv, attended)
            packed.output.multiply(attended, residual, Ending.ADD)
            x = self._norm(residual, packed.layer.post_norm)
            inner = self._buffer("inner", len(x), arch.intermediate_size)
            packed.gate_up.multiply(x, inner, Ending.GATED)
            packed.down.multiply(inner, residual, Ending.ADD)
        return self._norm(residual, decoder.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden) -> (R, vocabulary)"""
        logits = torch.empty(hidden.shape[0], self._decoder.arch.vocab_size)
        self._head.multiply(hidden.contiguous(), logits)
        return logits

    def _work_of(
        self, rows: Sequence[int], chunks: Sequence[Chunk], starts: Sequence[int], shared: Sequence[SharedPrefix]
    ) -> AttentionWork:
        """Each of these rows as a chunk of its own: the last layer's attention."""
        owners = np.searchsorted(starts, rows, side="right") - 1
        singles = []
        for row, owner in zip(rows, owners.tolist(), strict=True):
            chunk, position = chunks[owner], chunks[owner].start + row - starts[owner]
            singles.append(chunk._replace(token_ids=chunk.token_ids[row - starts[owner] :][:1], start=position))
        groups = []
        for group in shared:
            members = np.flatnonzero(np.isin(owners, group.chunks)).tolist()
            if len(members) > 1:
                groups.append(SharedPrefix(group.num_blocks, tuple(members)))
        return self._attention.work(singles, rows, groups)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In a buffer that the next norm will write to."""
        out = self._buffer("norm", len(x), x.shape[1])
        epsilon, threads = self._decoder.arch.rms_norm_eps, torch.get_num_threads()
        self._library.norm(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), *x.shape, threads)
        return out

    def _turn_and_keep(self, index: int, qkv: Tensor, turns: tuple[Tensor, Tensor], slots: Tensor) -> None:
        """Queries are turned where they lie; keys are turned into the pool, values copied."""
        arch, layer = self._decoder.arch, self._decoder.layers[index]
        cosines, sines = turns
        self._library.turn_and_keep(
            qkv.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            None if layer.query_norm is None else layer.query_norm.data_ptr(),
            None if layer.key_norm is None else layer.key_norm.data_ptr(),
            arch.rms_norm_eps,
            slots.data_ptr(),
            self._pool.layers[index].data_ptr(),
            qkv.shape[0],
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            torch.get_num_threads(),
        )

    def _buffer(self, name: str, rows: int, *shape: int) -> Tensor:
        """Kept from step to step: fresh memory would be mapped anew, page by page."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows:
            buffer = self._buffers[name] = torch.empty(rows, *shape)
        return buffer[:rows]
