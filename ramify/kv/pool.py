"""The tensors behind the blocks of one model: keys and values of every layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ramify.models.families import Architecture


class KVPool:
    """keys[layer] and values[layer] are (num_blocks * block_size, kv_heads, head_dim): one row per slot.

    Memory is taken when a slot is first written (the operating system maps fresh pages lazily).
    """

    def __init__(
        self, arch: Architecture, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (arch.num_layers, num_blocks * block_size, arch.num_kv_heads, arch.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """slots (T,), keys and values (T, kv_heads, head_dim)."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Gives each target block its source's content, in all layers."""
        listed = list(pairs)
        if not listed:
            return
        sources, targets = torch.tensor(listed, device=self.keys.device).unbind(1)
        for pool in (self.keys, self.values):
            blocks = pool.view(pool.shape[0], self.num_blocks, self.block_size, *pool.shape[2:])
            blocks[:, targets] = blocks[:, sources]


def bytes_per_block(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    return 2 * arch.num_layers * block_size * arch.num_kv_heads * arch.head_dim * dtype.itemsize
