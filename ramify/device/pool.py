"""The tensors behind the blocks of one model: keys and values of every layer."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ramify.device.memory_returned import PutAway, forget_pages
from ramify.engine.plan import BlockCopy, Work
from ramify.errors import ModelError
from ramify.models.families import Architecture

COPIED_AT_ONCE = 2**28  # bytes


class KVPool:
    """kv is (layers, slots, 2, kv_heads, head_dim): a slot is one position, keys first, then values.

    On a CPU a slot takes no memory before it is first written. The host memory for swapped-out blocks is allocated when
    the first block goes there.
    """

    def __init__(
        self,
        arch: Architecture,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        shape = (arch.num_layers, num_blocks * block_size, 2, arch.num_kv_heads, arch.head_dim)
        self.kv = _zeros(shape, dtype, device)
        # (layers, num_blocks, block_size, 2, kv_heads, head_dim): the same memory, block by block.
        self.blocks = self.kv.view(arch.num_layers, num_blocks, block_size, *shape[2:])
        # Making a view costs as much as a small product, so each layer's views are made once.
        self.layers = self.kv.unbind(0)
        self.layer_blocks = self.blocks.unbind(0)
        self._host_blocks: Tensor | None = None
        self._given_back: PutAway | None = None

    def move(self, work: Work) -> None:
        """This order is the scheduler's promise: a block may be read by one of these and then be another's target."""
        self.swap_out(work.swaps_out)
        self.copy_blocks(work.copies)
        self.swap_in(work.swaps_in)
        self.copy_blocks(work.late_copies)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """slots (T,), keys and values (T, kv_heads, head_dim)."""
        self.layers[layer].index_copy_(0, slots, torch.stack((keys, values), dim=1))

    def views(self, blocks: slice, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of the first `length` slots of consecutive blocks, layer by layer.

        Each is (1, kv_heads, length, head_dim).
        """
        start = blocks.start * self.block_size
        keys, values = self.kv[:, start : start + length].permute(2, 0, 3, 1, 4).unsqueeze(2).unbind(0)
        return keys.unbind(0), values.unbind(0)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks: a NaN left there by an earlier owner would come through any mask."""
        if blocks:
            self.blocks.index_fill_(1, self._tensor(blocks), 0)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Gives each target block its source's content, in all layers."""
        for layers, sources, targets in self._pieces(copies):
            blocks = self.blocks[layers]
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """From device blocks to host blocks."""
        for layers, sources, targets in self._pieces(copies):
            content = self.blocks[layers].index_select(1, sources).cpu()
            self._host()[layers].index_copy_(1, targets.cpu(), content)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """From host blocks to device blocks."""
        for layers, sources, targets in self._pieces(copies):
            content = self._host()[layers].index_select(1, sources.cpu()).to(self.kv.device)
            self.blocks[layers].index_copy_(1, targets, content)

    def _pieces(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some layers, and these blocks in them: sources (n,) and targets (n,).

        What they hold is no more than COPIED_AT_ONCE, or one layer: nobody set memory aside for blocks on their way,
        and they move when there is the least to spare. In each layer all sources are read before a target is written.
        """
        if copies:
            sources, targets = self._tensor(copies).unbind(1)
            step = max(1, COPIED_AT_ONCE // (len(copies) * self.layer_blocks[0][0].nbytes))
            for first in range(0, len(self.blocks), step):
                yield slice(first, first + step), sources, targets

    def give_back(self) -> None:
        """Frees the memory of all blocks, on the device and on the host: nothing that they hold is needed."""
        self._host_blocks = None
        if self.kv.device.type == "cpu":
            forget_pages(self.kv)
        else:
            self._given_back = PutAway([self.kv], keep=False)

    def take_again(self) -> None:
        if self._given_back is not None:
            self._given_back.bring_back()
            self._given_back = None
            self.kv.zero_()

    def _host(self) -> Tensor:
        if self._host_blocks is None:
            layers, _, *rest = self.blocks.shape
            shape = (layers, self.num_host_blocks, *rest)
            if self.kv.device.type == "cuda":
                self._host_blocks = torch.zeros(shape, dtype=self.kv.dtype, pin_memory=True)
            else:
                self._host_blocks = _zeros(shape, self.kv.dtype, self.kv.device)
        return self._host_blocks

    def _tensor(self, numbers: Sequence[int] | Sequence[BlockCopy]) -> Tensor:
        held = torch.tensor(numbers)
        if self.kv.device.type != "cuda":
            return held
        # Through pinned memory: a plain copy would wait for all that was launched before.
        return held.pin_memory().to(self.kv.device, non_blocking=True)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU as pages that the system maps at the first write (torch.zeros would write them all).

    Small pages: with huge ones, for which numpy asks, a first token clears 2 MB in every layer, and reading is no
    faster.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{device} has no {num_bytes / 2**30:.1f} GiB for the KV cache: lower num_kv_blocks, or leave it out, "
                "and gpu_memory_utilization says how much is taken; quantised weights, several devices that share the "
                f"model (tensor_parallel_size) and, for two models, a device each (devices) leave more room ({error})"
            ) from None
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        memory = mmap.mmap(-1, num_bytes, **private)  # held by the tensor
    except (OSError, OverflowError):
        raise ModelError(
            f"the system has no {num_bytes / 2**30:.1f} GiB for the KV cache: num_kv_blocks asks for less, quantised "
            "weights leave more room, and of two models one may be on a GPU (devices)"
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system that knows none
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bytes_per_block(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    return 2 * arch.num_layers * block_size * arch.num_kv_heads * arch.head_dim * dtype.itemsize
