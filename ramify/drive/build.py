"""From a configuration to an engine: models, caches, scheduler, device and core, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar, get_args

from ramify import validation as check
from ramify.config import STUDENT, EngineConfig, Lookup, MixtureConfig
from ramify.cpu.cpu_layers import cpu_layers
from ramify.cpu.cpu_step import CpuStep
from ramify.cpu.panels import PanelPacking
from ramify.device.layers import Layers
from ramify.device.pool import KVPool
from ramify.device.rehearsal import Largest, measure
from ramify.device.sizing import num_blocks, num_host_blocks
from ramify.device.step import DeviceStep
from ramify.device.warmup import warm_up
from ramify.drive.draft_model import DraftModel
from ramify.drive.intake import Intake
from ramify.drive.packing import check_integers, cpu_packing, gpu_packing
from ramify.drive.pair_intake import PairIntake
from ramify.drive.prepare import PreparedModel, PreparedPair, check_same_tokens
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.drafting.drafter import Drafter
from ramify.engine.drafting.lookup import LookupDrafter
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.scheduler import Scheduler
from ramify.errors import InvalidInputError, ModelError, UnsupportedError
from ramify.models.decoder import Decoder
from ramify.models.loader import ModelLoader
from ramify.parallel.leading import LeadingLayers
from ramify.parallel.orders import Serve
from ramify.parallel.start import start_team
from ramify.parallel.team import Team
from ramify.sampling.mixing import Mixer
from ramify.structured.grammars import Grammars
from ramify.text.codec import TextCodec
from ramify.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Intake)
# What a row adds to a step, of what a step takes without any: the default model's step of 1 row takes 14 ms of a core,
# one of 9 rows 46.
CPU_ROW_COST, GPU_ROW_COST = 0.35, 0.004
CPU_MOST_ROWS = 3  # a fifth row takes as long as three before it: beside four sequences no draft pays
GPU_STALL = 0.3  # of a step, where the host does not run ahead of the device


@dataclass(frozen=True, slots=True)
class Engine(Generic[Kind]):
    """Ready to be driven: `intake` makes the requests that `core` serves.

    A teacher and a student may be one checkpoint, which is then held once.
    """

    config: EngineConfig  # of two models, the teacher's
    decoders: tuple[Decoder, ...]
    codec: TextCodec
    core: EngineCore
    intake: Kind
    max_model_len: int
    team: Team | None = None  # the other ranks, where the models are shared


def build_engine(config: EngineConfig, say: Callable[[str], None], *, is_replica: bool = False) -> Engine[Intake]:
    """One engine: where there are to be several, one of them."""
    _check_alone(config, is_replica=is_replica)
    loader = ModelLoader(config, say)
    prepared = PreparedModel(config, loader)
    packing = cpu_packing(config, say)
    team = start_team([loader], config, uses_panels=packing is not None)
    (decoder,) = _load([loader], config, packing, team)
    check_integers(config, [decoder])
    drafting = _load_draft_model(config, prepared.codec.tokenizer, decoder, packing, say)
    max_model_len = config.model_config.resolve_max_model_len(decoder.arch.max_position_embeddings)
    core = _assemble(
        config,
        [decoder],
        codec=prepared.codec,
        grammars=prepared.grammars,
        eos_token_ids=_end_token_ids(decoder, prepared.codec.tokenizer, say),
        max_model_len=max_model_len,
        drafting=drafting,
        team=team,
        say=say,
    )
    return Engine(config, (decoder,), prepared.codec, core, prepared.intake(core.check), max_model_len, team)


def build_pair(
    teacher: EngineConfig,
    theta: EngineConfig,
    mixture: MixtureConfig,
    *,
    system_prompts: tuple[str | None, str | None] = (None, None),
    enable_chat_template: bool = False,
    say: Callable[[str], None],
    is_replica: bool = False,
) -> Engine[PairIntake]:
    """Both configurations differ in their model alone; where they name the same files, those are loaded once."""
    _check_alone(teacher, is_replica=is_replica)
    prepared = PreparedPair(
        teacher,
        [ModelLoader(config, say) for config in (teacher, theta)],
        system_prompts=system_prompts,
        enable_chat_template=enable_chat_template,
    )
    codec = prepared.codec
    packing = cpu_packing(teacher, say)
    student_drafts = _student_drafts(teacher)
    team = start_team(prepared.distinct_loaders, teacher, uses_panels=packing is not None)
    decoders = _load(prepared.distinct_loaders, teacher, packing, team)
    check_integers(teacher, decoders)
    lengths = [teacher.model_config.resolve_max_model_len(each.arch.max_position_embeddings) for each in decoders]
    ends = frozenset[int]().union(
        *(_end_token_ids(decoders[-role], tokenizer, say) for role, tokenizer in enumerate(prepared.tokenizers))
    )
    special = codec.tokenizer.special_token_ids if codec.tokenizer is not None else frozenset[int]()
    mixer = Mixer(mixture, ends | special)
    core = _assemble(
        teacher,
        decoders,
        codec=codec,
        grammars=prepared.grammars,
        eos_token_ids=ends,
        max_model_len=min(lengths),
        mixer=mixer,
        drafting=decoders[-1] if student_drafts else None,
        team=team,
        say=say,
    )
    return Engine(teacher, tuple(decoders), codec, core, prepared.intake(core.check), min(lengths), team)


def _check_alone(config: EngineConfig, *, is_replica: bool) -> None:
    if config.model_config.data_parallel_size > 1 and not is_replica:
        raise UnsupportedError(
            f"data_parallel_size must be 1 here, got {config.model_config.data_parallel_size}: this is one engine in "
            "this process"
        )


def _load(
    loaders: Sequence[ModelLoader], config: EngineConfig, packing: PanelPacking | None, team: Team | None
) -> list[Decoder]:
    """All ranks at the same time, where there are several."""
    if team is None:
        return [loader.load_model(packing=packing or gpu_packing(config, loader)) for loader in loaders]
    try:
        decoders = [loader.load_model(packing=packing, ranks=team.ranks) for loader in loaders]
        team.wait_until_loaded()
    except BaseException:
        team.close()
        raise
    return decoders


def _end_token_ids(decoder: Decoder, tokenizer: Tokenizer | None, say: Callable[[str], None]) -> frozenset[int]:
    """The checkpoint's and the tokenizer's; tokenizers may name tokens that were never given an embedding."""
    named = frozenset[int]() if tokenizer is None else tokenizer.eos_token_ids
    known = frozenset(token_id for token_id in named if token_id < decoder.arch.vocab_size)
    if named != known:
        say(
            f"The tokenizer's end token {', '.join(map(str, sorted(named - known)))} is outside the model's vocabulary "
            f"of {decoder.arch.vocab_size} tokens: it is never drawn and ends nothing"
        )
    return decoder.arch.eos_token_ids | known


def _assemble(
    config: EngineConfig,
    decoders: Sequence[Decoder],
    *,
    codec: TextCodec,
    grammars: Grammars,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    mixer: Mixer | None = None,
    drafting: Decoder | None = None,
    team: Team | None = None,
    say: Callable[[str], None],
) -> EngineCore:
    cache, limits = config.cache_config, config.scheduler_config
    on_gpu = decoders[0].device.type == "cuda"
    largest = Largest(
        num_models=len(decoders),
        num_tracks=1 if mixer is None else 2,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=limits.resolve_max_num_batched_tokens(on_gpu=on_gpu),
        block_size=cache.block_size,
    )
    make_step = partial(_device_step, config, decoders, max_model_len=max_model_len, mixer=mixer, team=team)
    blocks = num_blocks(
        cache,
        decoders,
        num_tracks=largest.num_tracks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        drafting=() if drafting is None else (drafting,),
        num_replicas=config.model_config.data_parallel_size,
        measure_gpu=partial(measure, make_step, decoders, largest) if on_gpu else None,
    )
    host_blocks = num_host_blocks(cache, decoders) if limits.preemption_mode == "swap" else 0
    pools = [
        KVPool(each.arch, blocks, cache.block_size, each.dtype, each.device, num_host_blocks=host_blocks)
        for each in decoders
    ]
    size = sum(pool.kv.nbytes for pool in pools) / 2**30
    _log.info("KV cache: %d blocks of %d tokens (%.2f GiB on %s)", blocks, cache.block_size, size, decoders[0].device)
    managers = [
        BlockManager(
            blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_host_blocks=host_blocks,
        )
        for _ in decoders
    ]
    step = make_step(pools)
    if on_gpu and config.model_config.warmup == "full" and not config.model_config.enforce_eager:
        warm_up(step, largest, blocks, say)
    has_tokenizer = codec.tokenizer is not None
    return EngineCore(
        Scheduler(
            managers,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=largest.max_num_batched_tokens,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            max_model_len=max_model_len,
            preemption_mode=limits.preemption_mode,
            speculation=_speculation(config, decoders, drafting, blocks, largest),
        ),
        step,
        seed=config.model_config.seed,
        eos_token_ids=eos_token_ids,
        make_text=codec.make_stream,
        encode_words=codec.encode_words if has_tokenizer else None,
        decode=codec.decode_token if has_tokenizer else None,
        begin_matcher=grammars.begin if has_tokenizer else None,
    )


def _load_draft_model(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    target: Decoder,
    packing: PanelPacking | None,
    say: Callable[[str], None],
) -> Decoder | None:
    """The model that drafts, where a model does."""
    name = config.model_config.speculation
    if name is None or name in get_args(Lookup):
        return None
    if name == STUDENT:
        raise InvalidInputError("speculation 'student' is for OptimalSampling: one model has no student")
    _check_not_shared(config)
    draft = replace(config.model_config, model=name, tokenizer=None, max_model_len=None, speculation=None)
    try:
        loader = ModelLoader(replace(config, model_config=draft), say)
    except ModelError as error:
        known = "'ngram', 'suffix', or a model that drafts: a folder, a .gguf file or a hub id"
        raise InvalidInputError(f"speculation must be {known}, got {name!r}: {error}") from None
    try:
        check_same_tokens(
            [tokenizer, loader.load_tokenizer()], [target.arch.vocab_size, loader.architecture.vocab_size]
        )
    except InvalidInputError:
        raise InvalidInputError(
            f"speculation: the draft model {name!r} must have the tokenizer of the model that it drafts for"
        ) from None
    return loader.load_model(packing=packing or gpu_packing(config, loader))


def _student_drafts(config: EngineConfig) -> bool:
    """Whether the student drafts for the mixture."""
    name = config.model_config.speculation
    if name is None or name in get_args(Lookup):
        return False
    if name != STUDENT:
        raise check.refuse("speculation", name, "'student', 'ngram', 'suffix' or None for two models")
    _check_not_shared(config)
    return True


def _check_not_shared(config: EngineConfig) -> None:
    if config.model_config.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"speculation {config.model_config.speculation!r} needs tensor_parallel_size 1: ranks do not share a model "
            "that drafts ('ngram' and 'suffix' work with any)"
        )


def _speculation(
    config: EngineConfig, decoders: Sequence[Decoder], drafting: Decoder | None, blocks: int, largest: Largest
) -> Speculation | None:
    scope = config.model_config.speculation
    if scope is None:
        return None
    drafter: Drafter
    if drafting is None:
        drafter = LookupDrafter("suffix" if scope == "suffix" else "ngram")
    else:
        length = min(largest.max_model_len, drafting.arch.max_position_embeddings or largest.max_model_len)
        pool = KVPool(drafting.arch, blocks, largest.block_size, drafting.dtype, drafting.device)
        # A student's prompt is the second of the mixture's.
        drafter = DraftModel(
            _device_step(config, [drafting], [pool], max_model_len=length, mixer=None, team=None),
            BlockManager(blocks, largest.block_size, enable_prefix_caching=config.cache_config.enable_prefix_caching),
            cost=drafting.arch.num_weights / sum(each.arch.num_weights for each in decoders),
            role=largest.num_tracks - 1,
            vocab_size=min(each.arch.vocab_size for each in decoders),
            max_model_len=length,
            max_num_batched_tokens=largest.max_num_batched_tokens,
        )
    if decoders[0].device.type == "cuda":
        return Speculation(drafter, row_cost=GPU_ROW_COST, stall=GPU_STALL)
    return Speculation(drafter, row_cost=CPU_ROW_COST, most_rows=CPU_MOST_ROWS)


def _device_step(
    config: EngineConfig,
    decoders: Sequence[Decoder],
    pools: Sequence[KVPool],
    *,
    max_model_len: int,
    mixer: Mixer | None,
    team: Team | None,
) -> DeviceStep:
    """What runs plans where the models are: kernels on a GPU, kernels of our own or torch's operators on a CPU."""
    _log.info("preparing the %s's kernels", "CPU" if decoders[0].device.type == "cpu" else "GPU")
    options, max_num_seqs = config.model_config, config.scheduler_config.max_num_seqs
    if decoders[0].device.type == "cpu":
        pairs = zip(decoders, pools, strict=True)
        layers = [cpu_layers(*pair, batch_invariant=options.batch_invariant) for pair in pairs]
        if team is not None:
            layers = _led(layers, pools, team)
        packing = decoders[0].packing
        return CpuStep(
            layers,
            packing.library if isinstance(packing, PanelPacking) else None,
            max_num_seqs=max_num_seqs,
            logprobs_mode=options.logprobs_mode,
            mixer=mixer,
            batch_invariant=options.batch_invariant,
        )
    from ramify.gpu.gpu_step import gpu_step  # needs Triton, which only a GPU needs

    return gpu_step(
        list(zip(decoders, pools, strict=True)),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        logprobs_mode=options.logprobs_mode,
        mixer=mixer,
        use_graphs=not options.enforce_eager,
        batch_invariant=options.batch_invariant,
    )


def _led(layers: Sequence[Layers], pools: Sequence[KVPool], team: Team) -> list[Layers]:
    """These layers as the leading rank's, with the other ranks' made like them."""
    team.serve(Serve(pools[0].blocks.shape[1], pools[0].num_host_blocks))
    return [LeadingLayers(each, team, model) for model, each in enumerate(layers)]
