"""Attention of pieces of prompts whose rows have the bits that they would have as decodes: `batch_invariant`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ramify.device.reads import Reads
from ramify.device.rows import upload
from ramify.gpu.kernels.causal_attention import PROGRAMS_PER_PROCESSOR, causal_attention, rows_of_a_tile
from ramify.gpu.kernels.prompt_list import build_prompt_list
from ramify.gpu.kernels.stretches import PositionCuts

_PROGRAMS_WITHOUT_A_GPU = 1


class ExactPrompts:
    """Made once a step; the keys and values of all its rows are written before it is asked."""

    def __init__(self, reads: Reads, cuts: PositionCuts) -> None:
        # Rows of prompts come after all single rows, and are all that `attend` is given.
        self._reads = replace(reads, first_rows=reads.first_rows - reads.num_singles)
        self._cuts = cuts
        self._work: Tensor | None = None
        self._positions: Tensor | None = None

    def attend(self, queries: Tensor, kv: Tensor) -> Tensor:
        """queries (T, heads, head_dim), kv (slots, 2, kv_heads, head_dim) -> (T, heads * head_dim)."""
        device = queries.device
        if self._work is None or self._positions is None:
            rows = rows_of_a_tile(queries.shape[1] // kv.shape[2], kv.itemsize)
            self._work = upload(build_prompt_list(self._reads, rows_of_a_tile=rows), device)
            self._positions = upload(self._cuts.positions.astype("int32"), device)
        programs = _PROGRAMS_WITHOUT_A_GPU
        if device.type == "cuda":
            processors: int = torch.cuda.get_device_properties(device).multi_processor_count
            programs = processors * PROGRAMS_PER_PROCESSOR
        out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        causal_attention(
            queries, kv, self._work, self._positions, out, block_size=self._reads.block_size, num_programs=programs
        )
        return out
