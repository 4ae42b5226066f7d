"""From a configuration to an engine: model, cache, scheduler, device and core, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ramify.attention.grouped import GroupedAttention
from ramify.config import EngineConfig
from ramify.core import Device, EngineCore
from ramify.intake import Intake
from ramify.kv.blocks import BlockManager
from ramify.kv.pool import KVPool
from ramify.kv.sizing import num_blocks, num_host_blocks
from ramify.models.decoder import Decoder
from ramify.models.loader import ModelLoader
from ramify.runner import Runner
from ramify.scheduler import Scheduler
from ramify.step import DeviceStep
from ramify.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class Engine:
    """One model, ready to be driven: `intake` makes the requests that `core` serves."""

    config: EngineConfig
    decoder: Decoder
    codec: TextCodec
    core: EngineCore
    intake: Intake
    max_model_len: int


def build_engine(config: EngineConfig, say: Callable[[str], None]) -> Engine:
    decoder, tokenizer = ModelLoader(config, say).load_model_and_tokenizer()
    codec = TextCodec(tokenizer)
    max_model_len = config.model_config.resolve_max_model_len(decoder.arch.max_position_embeddings)
    cache, limits = config.cache_config, config.scheduler_config
    max_num_batched_tokens = limits.resolve_max_num_batched_tokens(on_gpu=decoder.device.type == "cuda")
    blocks = num_blocks(
        cache,
        decoder,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    host_blocks = num_host_blocks(cache, decoder) if limits.preemption_mode == "swap" else 0
    pool = KVPool(decoder.arch, blocks, cache.block_size, decoder.dtype, decoder.device, num_host_blocks=host_blocks)
    manager = BlockManager(
        blocks,
        cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        num_host_blocks=host_blocks,
    )
    core = EngineCore(
        Scheduler(
            [manager],
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            max_model_len=max_model_len,
            preemption_mode=limits.preemption_mode,
        ),
        _device(decoder, pool, config, max_model_len),
        seed=config.model_config.seed,
        eos_token_ids=decoder.arch.eos_token_ids | (frozenset() if tokenizer is None else tokenizer.eos_token_ids),
        make_text=codec.make_stream,
        encode_words=None if tokenizer is None else codec.encode_words,
        decode=None if tokenizer is None else codec.decode_token,
    )
    intake = Intake(
        codec,
        vocab_size=decoder.arch.vocab_size,
        max_logprobs=config.model_config.max_logprobs,
        check_request=core.check,
    )
    return Engine(config, decoder, codec, core, intake, max_model_len)


def _device(decoder: Decoder, pool: KVPool, config: EngineConfig, max_model_len: int) -> Device:
    """What runs plans where the model is: graphs on a GPU, grouped attention on a CPU."""
    mode = config.model_config.logprobs_mode
    if decoder.device.type == "cpu":
        return DeviceStep(Runner(decoder, pool, GroupedAttention()), mode)
    from ramify.cuda.step import CudaStep  # needs Triton, which only a GPU needs

    return CudaStep(
        decoder,
        pool,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_model_len=max_model_len,
        logprobs_mode=mode,
        use_graphs=not config.model_config.enforce_eager,
    )
