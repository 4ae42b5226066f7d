"""From a server's options to the models it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ramify.async_llm import AsyncLLM
from ramify.config import EngineConfig, MixtureConfig
from ramify.drive.async_engine import AsyncEngine
from ramify.drive.build import build_pair
from ramify.server.config import PairConfig
from ramify.server.service import ServedModel, public_name

Say = Callable[[str], None]


def load_model(model: str, options: Mapping[str, Any], name: str | None, say: Say) -> ServedModel:
    llm = AsyncLLM(model, say=say, **options)
    if llm.generation_defaults:
        say(f"Defaults of requests: {llm.generation_defaults}")
    return ServedModel.of(llm, name)


def load_pair(
    pair: PairConfig, mixture: MixtureConfig, options: Mapping[str, Any], name: str | None, say: Say
) -> ServedModel:
    """Two models as one, by default under both names."""
    assert pair.teacher is not None, "asked for only with two models"
    assert pair.theta is not None
    engine = build_pair(
        EngineConfig.from_options(model=pair.teacher, **options),
        EngineConfig.from_options(model=pair.theta, **options),
        mixture,
        system_prompts=(pair.teacher_system_prompt, pair.theta_system_prompt),
        say=say,
    )
    names = public_name(pair.teacher), public_name(pair.theta)
    return ServedModel(
        name or "+".join(names), AsyncEngine(engine.core), engine.intake, engine.max_model_len, mixed=names
    )
