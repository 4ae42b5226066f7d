"""Models loaded for a server: in this process, in one of their own, or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.async_llm import AsyncLLM
from ramify.config import EngineConfig, MixtureConfig
from ramify.drive.async_engine import AsyncEngine
from ramify.drive.build import build_pair
from ramify.drive.placing import has_own_process
from ramify.errors import ChatTemplateError, InvalidInputError
from ramify.models.generation_defaults import GenerationDefaults
from ramify.remote.engine_process import EngineProcess
from ramify.remote.messages import OneModel
from ramify.remote.start import start, wanted_of
from ramify.replicas.replica_engine import ReplicaEngine
from ramify.replicas.start import start_replicas
from ramify.server.service import ServedModel
from ramify.server.to_serve import ModelToServe, served

Say = Callable[[str], None]


def load_models(
    models: Sequence[ModelToServe], engine_process: bool | None, say: Say, process: EngineProcess | None = None
) -> list[ServedModel]:
    """All in this process, or all in one of their own: a new one, or one that was started early; or in several."""
    if models[0].config.model_config.data_parallel_size > 1:
        if process is not None:
            process.stop()  # it was to have the whole machine
        loaded = _replicated(models, engine_process, say)
    elif has_own_process(engine_process, models[0].config):
        loaded = served(models, start([wanted_of(model.build, say) for model in models], say, process))
    else:
        if process is not None:
            process.stop()
        loaded = [_load_here(model, say) for model in models]
    for model in loaded:
        _tell_defaults(model.intake.defaults, say)
        _compile_template(model, say)
    return loaded


def _replicated(models: Sequence[ModelToServe], engine_process: bool | None, say: Say) -> list[ServedModel]:
    """Every process has all models."""
    if engine_process is False:
        raise InvalidInputError("data_parallel_size must be 1 without processes for engines (--no-engine-process)")
    started = start_replicas([wanted_of(model.build, say) for model in models], say, ReplicaEngine)
    return [
        ServedModel(
            model.name,
            each.engine,
            each.intake,
            each.engine.capacity.max_model_len,
            mixed=model.mixed,
            owner=each,
        )
        for model, each in zip(models, started, strict=True)
    ]


def _load_here(model: ModelToServe, say: Say) -> ServedModel:
    if isinstance(model.build, OneModel):
        return ServedModel.of(AsyncLLM(say=say, **model.build.options), model.name)
    engine = build_pair(
        EngineConfig.from_options(**model.build.teacher),
        EngineConfig.from_options(**model.build.theta),
        MixtureConfig(**model.build.mixture),
        system_prompts=model.build.system_prompts,
        are_apart=model.build.are_apart,
        say=say,
    )
    return ServedModel(model.name, AsyncEngine(engine.core), engine.intake, engine.max_model_len, mixed=model.mixed)


def _compile_template(model: ServedModel, say: Say) -> None:
    """Now rather than while the first chat waits. Without it the model still completes texts."""
    try:
        _ = model.intake.codec.chat_template
    except ChatTemplateError as error:
        say(f"{model.name} cannot chat: {error}")


def _tell_defaults(defaults: GenerationDefaults, say: Say) -> None:
    if defaults:
        say(f"Defaults of requests: {defaults}")
