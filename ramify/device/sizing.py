"""How many KV blocks an engine gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ramify.config import CacheConfig
from ramify.device.pool import bytes_per_block
from ramify.errors import InvalidInputError
from ramify.models.decoder import Decoder
from ramify.models.memory import free_memory, kv_pool_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What a GPU has, and what of it is spoken for, in bytes."""

    total: int
    needed: int  # by the weights and the largest steps, as measured
    beside: int  # by the driver and by other processes

    @property
    def room(self) -> int:
        return self.total - self.needed - self.beside

    def left(self, share: float) -> int:
        """Of this share of the GPU."""
        return int(share * self.total) - self.needed - self.beside

    def refusal(self, device: torch.device, share: float, block_bytes: int) -> InvalidInputError:
        return InvalidInputError(
            f"no memory is left for the KV cache on {device}: gpu_memory_utilization {share} of "
            f"{self.total / GIB:.1f} GiB is {share * self.total / GIB:.1f}, the weights and the largest step take "
            f"{self.needed / GIB:.1f}, other things on this GPU {self.beside / GIB:.1f}, and a block takes "
            f"{block_bytes} bytes. What helps: a higher gpu_memory_utilization, a lower max_num_batched_tokens, "
            "max_num_seqs or max_model_len, a smaller or quantised model, a larger device or several that share the "
            "model (tensor_parallel_size), and for two models a device each (devices)"
        )


def num_blocks(
    cache: CacheConfig,
    decoders: Sequence[Decoder],
    *,
    num_tracks: int,
    max_num_seqs: int,
    max_model_len: int,
    num_replicas: int = 1,
    drafting: Sequence[Decoder] = (),
    measure_gpus: Callable[[], Mapping[torch.device, GpuMemory]] | None = None,
) -> int:
    """What the config says, else what memory allows, but never more than all sequences at full length could fill.

    Every model gets this many. A sequence grows by one position in each of its tracks, so the caches run out together.
    So does a model that drafts for them. Where models are on several devices, the one with the least room decides.
    `measure_gpus` is asked only where it matters; what it does not tell of is a CPU, whose memory all replicas share.
    """
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    measured = {} if measure_gpus is None else measure_gpus()
    fitting = [max_num_seqs * -(-max_model_len // cache.block_size) * (num_tracks // len(decoders))]
    by_device: dict[torch.device, list[Decoder]] = {}
    for each in [*decoders, *drafting]:
        by_device.setdefault(numbered(each.device), []).append(each)
    for device, own in by_device.items():
        if device in measured:
            block_bytes = _bytes_of_blocks(cache, own)  # of one rank: a GPU holds no other's part
            fitting.append(measured[device].left(cache.gpu_memory_utilization) // block_bytes)
            if fitting[-1] < 1:
                raise measured[device].refusal(device, cache.gpu_memory_utilization, block_bytes)
        else:
            block_bytes = _bytes_with_ranks(cache, own)
            fitting.append(kv_pool_bytes(free_memory() // num_replicas) // block_bytes)
            if fitting[-1] < 1:
                raise InvalidInputError(
                    f"no memory is left for KV blocks of {block_bytes} bytes: take a smaller or quantised model, lower "
                    "block_size, or set num_kv_blocks; of two models one may be on a GPU (devices)"
                )
    return min(fitting)


def numbered(device: torch.device) -> torch.device:
    """The same, with its number where it is a GPU."""
    index: int | None = device.index
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and index is None else device


def num_host_blocks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """How many blocks of each model fit into swap_space, with the parts of all ranks."""
    return int(cache.swap_space * GIB // _bytes_with_ranks(cache, decoders))


def _bytes_with_ranks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """What one block of each model takes in the memory of a machine, which all ranks of a model share."""
    return sum(each.shard.size * _bytes_of_blocks(cache, [each]) for each in decoders)


def _bytes_of_blocks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """What one block of each model takes together."""
    return sum(bytes_per_block(decoder.arch, cache.block_size, decoder.dtype) for decoder in decoders)
