"""From a configuration to an engine: models, caches, scheduler, device and core, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar, get_args

from ramify import validation as check
from ramify.config import STUDENT, EngineConfig, Lookup, MixtureConfig
from ramify.cpu.panels import PanelPacking
from ramify.device.guard import on
from ramify.device.pool import KVPool
from ramify.device.rehearsal import Largest, measure
from ramify.device.sizing import num_blocks, num_host_blocks
from ramify.device.warmup import warm_up
from ramify.drive.drafting import speculation_of
from ramify.drive.intake import Intake
from ramify.drive.pair_intake import PairIntake
from ramify.drive.placing import PlacedModel, Wanted, device_step, drawing_model, load, place, student_drafts_there
from ramify.drive.prepare import PreparedModel, PreparedPair, check_same_tokens
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.scheduler import Scheduler
from ramify.errors import InvalidInputError, ModelError, UnsupportedError
from ramify.models.decoder import Decoder
from ramify.models.loader import ModelLoader, rank_devices
from ramify.parallel.team import Team
from ramify.sampling.mixing import Mixer
from ramify.structured.grammars import Grammars
from ramify.structured.mask_threads import num_workers
from ramify.text.codec import TextCodec
from ramify.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Intake)


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
    rank_devices(config.model_config)  # refused before files are looked for
    loader = ModelLoader(config, say)
    prepared = PreparedModel(config, loader)
    [model] = place([Wanted(config, loader)], say)
    decoder = model.decoder
    drafting = _load_draft_model(config, prepared.codec.tokenizer, decoder, say)
    max_model_len = config.model_config.resolve_max_model_len(decoder.arch.max_position_embeddings)
    core = _assemble(
        config,
        [model],
        codec=prepared.codec,
        grammars=prepared.grammars,
        eos_token_ids=_end_token_ids(decoder, prepared.codec.tokenizer, say),
        max_model_len=max_model_len,
        drafting=drafting,
        say=say,
    )
    return Engine(config, (decoder,), prepared.codec, core, prepared.intake(core.check), max_model_len, model.team)


def build_pair(
    teacher: EngineConfig,
    theta: EngineConfig,
    mixture: MixtureConfig,
    *,
    system_prompts: tuple[str | None, str | None] = (None, None),
    enable_chat_template: bool = False,
    are_apart: bool = False,
    say: Callable[[str], None],
    is_replica: bool = False,
) -> Engine[PairIntake]:
    """Both configurations differ in their model alone; where they name the same files, those are loaded once.

    Models that are apart have each its own device, or several, which then differ too.
    """
    _check_alone(teacher, is_replica=is_replica)
    for config in (teacher, theta):
        rank_devices(config.model_config)
    loaders = [ModelLoader(config, say) for config in (teacher, theta)]
    prepared = PreparedPair(
        teacher,
        loaders,
        system_prompts=system_prompts,
        enable_chat_template=enable_chat_template,
    )
    codec = prepared.codec
    student_drafts = _student_drafts(theta)
    wanted = [Wanted(teacher, loaders[0]), Wanted(theta, loaders[1])][: prepared.num_distinct]
    models = place(wanted, say, are_apart=are_apart)
    decoders = [model.decoder for model in models]
    lengths = [teacher.model_config.resolve_max_model_len(each.arch.max_position_embeddings) for each in decoders]
    named = frozenset[int]().union(
        *(_end_token_ids(decoders[-role], tokenizer, say) for role, tokenizer in enumerate(prepared.tokenizers))
    )
    # One model may name an end among the entries that the other is not padded to: it is never drawn.
    ends = frozenset(token_id for token_id in named if token_id < prepared.vocab_size)
    special = codec.tokenizer.special_token_ids if codec.tokenizer is not None else frozenset[int]()
    mixer = Mixer(mixture, ends | special)
    core = _assemble(
        teacher,
        models,
        codec=codec,
        grammars=prepared.grammars,
        eos_token_ids=ends,
        max_model_len=min(lengths),
        mixer=mixer,
        drafting=decoders[-1] if student_drafts else None,
        are_apart=are_apart and len(models) > 1,
        say=say,
    )
    return Engine(teacher, tuple(decoders), codec, core, prepared.intake(core.check), min(lengths), models[0].team)


def _check_alone(config: EngineConfig, *, is_replica: bool) -> None:
    if config.model_config.data_parallel_size > 1 and not is_replica:
        raise UnsupportedError(
            f"data_parallel_size must be 1 here, got {config.model_config.data_parallel_size}: this is one engine in "
            "this process"
        )


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


def _words(codec: TextCodec, vocab_size: int, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """As token ids; one with a token that was never given an embedding is never written."""
    return tuple(token_ids for token_ids in codec.encode_words(words) if max(token_ids) < vocab_size)


def _assemble(
    config: EngineConfig,
    models: Sequence[PlacedModel],
    *,
    codec: TextCodec,
    grammars: Grammars,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    mixer: Mixer | None = None,
    drafting: Decoder | None = None,
    are_apart: bool = False,
    say: Callable[[str], None],
) -> EngineCore:
    cache, limits = config.cache_config, config.scheduler_config
    decoders = [model.decoder for model in models]
    device = models[drawing_model(models)].device
    on_gpu, no_cpu = device.type == "cuda", all(model.device.type == "cuda" for model in models)
    largest = Largest(
        num_models=len(decoders),
        num_tracks=1 if mixer is None else 2,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=limits.resolve_max_num_batched_tokens(on_gpu=no_cpu),
        block_size=cache.block_size,
    )
    make_step = partial(device_step, config, models, max_model_len=max_model_len, mixer=mixer, are_apart=are_apart)
    blocks = num_blocks(
        cache,
        decoders,
        num_tracks=largest.num_tracks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        drafting=() if drafting is None or student_drafts_there(config, models, are_apart=are_apart) else (drafting,),
        num_replicas=config.model_config.data_parallel_size,
        measure_gpus=partial(measure, make_step, decoders, largest, _teams(models)) if on_gpu else None,
    )
    host_blocks = num_host_blocks(cache, decoders) if limits.preemption_mode == "swap" else 0
    pools = [
        KVPool(each.arch, blocks, cache.block_size, each.dtype, each.device, num_host_blocks=host_blocks)
        for each in decoders
    ]
    size = sum(pool.kv.nbytes for pool in pools) / 2**30
    where = " and ".join(dict.fromkeys(str(model.device) for model in models))
    _log.info("KV cache: %d blocks of %d tokens (%.2f GiB on %s)", blocks, cache.block_size, size, where)
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
        with on(device):
            warm_up(step, largest, blocks, say)
    has_tokenizer = codec.tokenizer is not None
    if on_gpu:  # it waits for no masks that are found in time
        grammars.use_workers(num_workers())
    return EngineCore(
        Scheduler(
            managers,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=largest.max_num_batched_tokens,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            max_model_len=max_model_len,
            preemption_mode=limits.preemption_mode,
            speculation=speculation_of(config, models, step, managers, drafting=drafting, largest=largest),
        ),
        step,
        seed=config.model_config.seed,
        eos_token_ids=eos_token_ids,
        make_text=codec.make_stream,
        encode_words=partial(_words, codec, min(each.arch.vocab_size for each in decoders)) if has_tokenizer else None,
        decode=codec.decode_token if has_tokenizer else None,
        begin_matcher=grammars.begin if has_tokenizer else None,
    )


def _teams(models: Sequence[PlacedModel]) -> list[Team]:
    return list(dict.fromkeys(model.team for model in models if model.team is not None))


def _load_draft_model(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    target: Decoder,
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
    config = replace(config, model_config=draft)
    try:
        loader = ModelLoader(config, say)
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
    return load(Wanted(config, loader), target.packing if isinstance(target.packing, PanelPacking) else None)


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
    if config.model_config.num_ranks > 1:
        raise UnsupportedError(
            f"speculation {config.model_config.speculation!r} needs tensor_parallel_size 1: ranks do not share a model "
            "that drafts ('ngram' and 'suffix' work with any)"
        )
