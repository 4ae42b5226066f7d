"""How many KV blocks an engine gets."""

from __future__ import annotations

import os

import torch

from ramify.config import CacheConfig
from ramify.errors import InvalidInputError
from ramify.kv.pool import bytes_per_block
from ramify.models.decoder import Decoder

CPU_POOL_BYTES = 4 * 2**30


def num_blocks(cache: CacheConfig, decoder: Decoder, *, max_num_seqs: int, max_model_len: int) -> int:
    """What was asked for, else what memory allows; never more than all sequences at full length could fill."""
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    block_bytes = bytes_per_block(decoder.arch, cache.block_size, decoder.dtype)
    most = max_num_seqs * -(-max_model_len // cache.block_size)
    fitting = _pool_bytes(cache, decoder.device) // block_bytes
    if fitting < 1:
        raise InvalidInputError(
            f"no memory is left for KV blocks of {block_bytes} bytes: lower block_size, or set num_kv_blocks"
        )
    return int(min(fitting, most))


def num_host_blocks(cache: CacheConfig, decoder: Decoder) -> int:
    """How many blocks swap_space holds."""
    return int(cache.swap_space * 2**30 // bytes_per_block(decoder.arch, cache.block_size, decoder.dtype))


def _pool_bytes(cache: CacheConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(cache.gpu_memory_utilization * total) - (total - free)
    return min(CPU_POOL_BYTES, _free_memory() // 4)


def _free_memory() -> int:
    """Bytes the system could hand out now."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123
            available = next(line for line in file if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
