"""Attention of pieces of prompts on a GPU: lists in buffers that outlive a step, so that CUDA graphs stay valid.

once a step     write_list      the tiles of all pieces to the device, in one copy
once a layer    attend          prompt_attention
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.device.graphs import MOST_ROWS_WITH_PROMPTS
from ramify.device.reads import Reads
from ramify.device.rows import upload
from ramify.device.staging import Staging
from ramify.gpu.kernels.prompt_attention import PROGRAMS_PER_PROCESSOR, prompt_attention, rows_of_a_tile
from ramify.gpu.kernels.prompt_list import build_prompt_list, longest_list

_PROCESSORS_WITHOUT_A_GPU = 1


class PagedPrompts:
    """`max_chunks` pieces of a step at most, each of `max_blocks` blocks with its past."""

    def __init__(
        self,
        *,
        max_chunks: int,
        max_blocks: int,
        queries_per_row: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        processors = _PROCESSORS_WITHOUT_A_GPU
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_programs = processors * PROGRAMS_PER_PROCESSOR
        self._rows_of_a_tile = rows_of_a_tile(queries_per_row, dtype.itemsize)
        self._block_size = block_size
        size = longest_list(MOST_ROWS_WITH_PROMPTS, max_chunks, max_blocks)
        self._kept = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(size, dtype=torch.int32, device=device)
        self._list = self._kept

    def write_list(self, reads: Reads) -> None:
        """From now on `attend` serves these pieces."""
        work = build_prompt_list(reads, rows_of_a_tile=self._rows_of_a_tile)
        if len(work) > len(self._kept):  # of more rows than any graph has
            self._list = upload(work, self._kept.device)
            return
        self._list = self._kept
        staged = self._staging.take()[: len(work)]
        staged.numpy()[:] = work
        self._kept[: len(work)].copy_(staged, non_blocking=True)
        self._staging.sent()

    def attend(self, queries: Tensor, kv_layer: Tensor, out: Tensor) -> None:
        """queries (T, heads, head_dim), kv_layer (slots, 2, kv_heads, head_dim) -> their rows of out (T, heads *
        head_dim). The keys and values of all rows are written before."""
        prompt_attention(
            queries, kv_layer, self._list, out, block_size=self._block_size, num_programs=self._num_programs
        )
