"""How many KV blocks an engine gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ramify.config import CacheConfig
from ramify.device.pool import bytes_per_block
from ramify.errors import InvalidInputError
from ramify.models.decoder import Decoder
from ramify.models.memory import free_memory

CPU_POOL_BYTES = 4 * 2**30
WORKSPACE_BYTES = 2**30  # of cuBLAS, graphs and partial attention results


def num_blocks(
    cache: CacheConfig,
    decoders: Sequence[Decoder],
    *,
    num_tracks: int,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> int:
    """What the config says, else what memory allows, but never more than all sequences at full length could fill.

    Every model gets this many. A sequence grows by one position in each of its tracks, so the caches run out together.
    """
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    block_bytes = _bytes_of_blocks(cache, decoders)
    most = max_num_seqs * -(-max_model_len // cache.block_size) * (num_tracks // len(decoders))
    fitting = _pool_bytes(cache, decoders, max_num_seqs, max_num_batched_tokens) // block_bytes
    if fitting < 1:
        raise InvalidInputError(
            f"no memory is left for KV blocks of {block_bytes} bytes: lower block_size, or set num_kv_blocks"
        )
    return int(min(fitting, most))


def num_host_blocks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """How many blocks of each model fit into swap_space."""
    return int(cache.swap_space * 2**30 // _bytes_of_blocks(cache, decoders))


def _bytes_of_blocks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """What one block of each model takes together."""
    return sum(bytes_per_block(decoder.arch, cache.block_size, decoder.dtype) for decoder in decoders)


def _pool_bytes(cache: CacheConfig, decoders: Sequence[Decoder], max_num_seqs: int, max_num_batched_tokens: int) -> int:
    if decoders[0].device.type == "cuda":
        free, total = torch.cuda.mem_get_info(decoders[0].device)
        working = sum(_working_bytes(decoder, max_num_seqs, max_num_batched_tokens) for decoder in decoders)
        return int(cache.gpu_memory_utilization * total) - (total - free) - working
    return min(CPU_POOL_BYTES, free_memory() // 4)


def _working_bytes(decoder: Decoder, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """What the largest step needs besides weights and cache: activations, logits and the libraries' workspaces."""
    arch = decoder.arch
    heads = (
        2 * arch.num_heads + 4 * arch.num_kv_heads
    ) * arch.head_dim  # queries twice; keys and values, and both gathered
    token = (6 * arch.hidden_size + 3 * arch.intermediate_size + heads) * decoder.dtype.itemsize
    logits = 3 * max_num_seqs * arch.vocab_size * 4  # and two copies where controls change them
    return max_num_batched_tokens * token + logits + WORKSPACE_BYTES
