"""From a server's options to the models it serves: in this process, or in one of their own.

models = models_to_serve(...)                 plain data, which another process can be told
load_models(models, engine_process, say)      in the process that starts all
served(models, join(socket, ...))             in a further front process (`remote/start.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ramify.async_llm import AsyncLLM
from ramify.config import EngineConfig, MixtureConfig, configs_of_pair
from ramify.drive.async_engine import AsyncEngine
from ramify.drive.build import build_pair
from ramify.drive.prepare import has_own_process
from ramify.errors import ChatTemplateError, InvalidInputError
from ramify.models.generation_defaults import GenerationDefaults
from ramify.remote.engine_process import EngineProcess
from ramify.remote.messages import OneModel, TwoModels
from ramify.remote.packing import options_of
from ramify.remote.start import Joined, start, wanted_of
from ramify.replicas.replica_engine import ReplicaEngine
from ramify.replicas.start import start_replicas
from ramify.server.config import PairConfig
from ramify.server.service import ServedModel, public_name

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """The name that clients know it by, and what its engine is built from."""

    name: str
    build: OneModel | TwoModels
    mixed: tuple[str, str] | None = None  # of a mixture: the names of teacher and student

    @property
    def config(self) -> EngineConfig:
        """Of two models, the teacher's: they differ in their files, and where each has its own, in their devices."""
        return EngineConfig.from_options(
            **(self.build.options if isinstance(self.build, OneModel) else self.build.teacher)
        )


def model_to_serve(model: str, options: Mapping[str, Any], name: str | None) -> ModelToServe:
    config = EngineConfig.from_options(model=model, **options)
    return ModelToServe(name or public_name(model), OneModel(options_of(config)))


def pair_to_serve(
    pair: PairConfig, mixture: MixtureConfig, options: Mapping[str, Any], name: str | None
) -> ModelToServe:
    """Two models as one, by default under both names."""
    assert pair.teacher is not None, "asked for only with two models"
    assert pair.theta is not None
    teacher, theta = map(options_of, configs_of_pair(pair.teacher, pair.theta, pair.devices, options))
    names = public_name(pair.teacher), public_name(pair.theta)
    system_prompts = (pair.teacher_system_prompt, pair.theta_system_prompt)
    build = TwoModels(teacher, theta, asdict(mixture), system_prompts, are_apart=pair.devices is not None)
    return ModelToServe(name or "+".join(names), build, names)


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


def served(models: Sequence[ModelToServe], joined: Sequence[Joined]) -> list[ServedModel]:
    """Models whose engines run in another process."""
    return [
        ServedModel(
            model.name,
            each.engine,
            each.prepared.intake(each.engine.check),
            each.engine.capacity.max_model_len,
            mixed=model.mixed,
        )
        for model, each in zip(models, joined, strict=True)
    ]


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
