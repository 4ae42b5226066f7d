"""What a server is to serve: plain data, which another process can be told, and of it what can be asked: without torch.

models = models_to_serve(...)                 plain data
load_models(models, engine_process, say)      in the process that starts all (`load.py`)
served(models, join(socket, ...))             in a further front process (`remote/start.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ramify.config import EngineConfig, MixtureConfig, configs_of_pair
from ramify.remote.messages import OneModel, TwoModels
from ramify.remote.packing import options_of
from ramify.remote.start import Joined
from ramify.server.config import PairConfig
from ramify.server.service import ServedModel, public_name


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
