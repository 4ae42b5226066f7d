"""How many KV blocks an engine gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    def left(self, share: float) -> int:
        """Of this share of the GPU."""
        return int(share * self.total) - self.needed - self.beside

    def refusal(self, share: float, block_bytes: int) -> InvalidInputError:
        return InvalidInputError(
            f"no memory is left for the KV cache: gpu_memory_utilization {share} of {self.total / GIB:.1f} GiB is "
            f"{share * self.total / GIB:.1f}, the weights and the largest step take {self.needed / GIB:.1f}, other "
            f"things on this GPU {self.beside / GIB:.1f}, and a block takes {block_bytes} bytes. What helps: a higher "
            "gpu_memory_utilization, a lower max_num_batched_tokens, max_num_seqs or max_model_len, a smaller or "
            "quantised model, more or larger devices"
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
    measure_gpu: Callable[[], GpuMemory] | None = None,
) -> int:
    """What the config says, else what memory allows, but never more than all sequences at full length could fill.

    Every model gets this many. A sequence grows by one position in each of its tracks, so the caches run out together.
    So does a model that drafts for them. `measure_gpu` is asked only where it matters; None: the models are on a CPU,
    whose memory all replicas share.
    """
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    # Ranks on CPUs are on one machine, and share its memory; a GPU holds one rank's part.
    sharers = decoders[0].shard.size if measure_gpu is None else 1
    block_bytes = sharers * _bytes_of_blocks(cache, [*decoders, *drafting])
    most = max_num_seqs * -(-max_model_len // cache.block_size) * (num_tracks // len(decoders))
    if measure_gpu is None:
        fitting = kv_pool_bytes(free_memory() // num_replicas) // block_bytes
        if fitting < 1:
            raise InvalidInputError(
                f"no memory is left for KV blocks of {block_bytes} bytes: take a smaller or quantised model, lower "
                "block_size, or set num_kv_blocks"
            )
    else:
        memory = measure_gpu()
        fitting = memory.left(cache.gpu_memory_utilization) // block_bytes
        if fitting < 1:
            raise memory.refusal(cache.gpu_memory_utilization, block_bytes)
    return int(min(fitting, most))


def num_host_blocks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """How many blocks of each model fit into swap_space, with the parts of all ranks."""
    return int(cache.swap_space * GIB // (decoders[0].shard.size * _bytes_of_blocks(cache, decoders)))


def _bytes_of_blocks(cache: CacheConfig, decoders: Sequence[Decoder]) -> int:
    """What one block of each model takes together."""
    return sum(bytes_per_block(decoder.arch, cache.block_size, decoder.dtype) for decoder in decoders)
