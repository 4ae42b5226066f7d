"""How many KV blocks an engine gets."""

from __future__ import annotations

import os

import torch

from ramify.config import CacheConfig
from ramify.errors import InvalidInputError
from ramify.kv.pool import bytes_per_block
from ramify.models.decoder import Decoder

CPU_POOL_BYTES = 4 * 2**30
WORKSPACE_BYTES = 2**30  # of cuBLAS, graphs and partial attention results


def num_blocks(
    cache: CacheConfig, decoder: Decoder, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> int:
    """What was asked for, else what memory allows; never more than all sequences at full length could fill."""
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    block_bytes = bytes_per_block(decoder.arch, cache.block_size, decoder.dtype)
    most = max_num_seqs * -(-max_model_len // cache.block_size)
    fitting = _pool_bytes(cache, decoder, max_num_seqs, max_num_batched_tokens) // block_bytes
    if fitting < 1:
        raise InvalidInputError(
            f"no memory is left for KV blocks of {block_bytes} bytes: lower block_size, or set num_kv_blocks"
        )
    return int(min(fitting, most))


def num_host_blocks(cache: CacheConfig, decoder: Decoder) -> int:
    """How many blocks swap_space holds."""
    return int(cache.swap_space * 2**30 // bytes_per_block(decoder.arch, cache.block_size, decoder.dtype))


def _pool_bytes(cache: CacheConfig, decoder: Decoder, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    if decoder.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(decoder.device)
        working = working_bytes(decoder, max_num_seqs, max_num_batched_tokens)
        return int(cache.gpu_memory_utilization * total) - (total - free) - working
    return min(CPU_POOL_BYTES, _free_memory() // 4)


def working_bytes(decoder: Decoder, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """What the largest step needs beside weights and cache: its activations, its logits, and libraries' workspaces."""
    arch = decoder.arch
    heads = (2 * arch.num_heads + 4 * arch.num_kv_heads) * arch.head_dim  # queries twice, keys and values gathered
    token = (6 * arch.hidden_size + 3 * arch.intermediate_size + heads) * decoder.dtype.itemsize
    logits = 3 * max_num_seqs * arch.vocab_size * 4  # drawn from, and two copies where controls change them
    return max_num_batched_tokens * token + logits + WORKSPACE_BYTES


def _free_memory() -> int:
    """Bytes the system could hand out now."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123
            available = next(line for line in file if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
