"""Replicas for those who open them: what they need beyond the core is imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from ramify.config import EngineConfig, MixtureConfig
from ramify.errors import RamifyError

if TYPE_CHECKING:
    from ramify.remote.messages import OneModel, TwoModels
    from ramify.replicas.replica_core import ReplicaCore
    from ramify.replicas.replica_engine import ReplicaEngine
    from ramify.replicas.start import Replicas

    Face = TypeVar("Face", ReplicaCore, ReplicaEngine)

Say = Callable[[str], None]


def model_for_calls(config: EngineConfig, say: Say) -> Replicas[ReplicaCore]:
    """One model in several processes, for plain calls."""
    check_processes()
    from ramify.replicas.replica_core import ReplicaCore

    return _started(_one(config), say, ReplicaCore)


def model_for_streams(config: EngineConfig, say: Say) -> Replicas[ReplicaEngine]:
    """The same, for event loops."""
    check_processes()
    from ramify.replicas.replica_engine import ReplicaEngine

    return _started(_one(config), say, ReplicaEngine)


def pair_for_calls(
    teacher: EngineConfig,
    theta: EngineConfig,
    mixture: MixtureConfig,
    *,
    system_prompts: tuple[str | None, str | None],
    enable_chat_template: bool,
    say: Say,
) -> Replicas[ReplicaCore]:
    """A teacher and a student in several processes, for plain calls."""
    check_processes()
    from ramify.remote.messages import TwoModels
    from ramify.remote.packing import options_of
    from ramify.replicas.replica_core import ReplicaCore

    build = TwoModels(options_of(teacher), options_of(theta), asdict(mixture), system_prompts, enable_chat_template)
    return _started(build, say, ReplicaCore)


def check_processes() -> None:
    """Raises where what processes speak to each other in is not installed."""
    try:
        import msgspec  # noqa: F401
    except ModuleNotFoundError as error:
        raise RamifyError(
            f'data_parallel_size above 1 needs {error.name}: pip install ".[server]" in a checkout'
        ) from None


def _one(config: EngineConfig) -> OneModel:
    from ramify.remote.messages import OneModel
    from ramify.remote.packing import options_of

    return OneModel(options_of(config))


def _started(build: OneModel | TwoModels, say: Say, face: type[Face]) -> Replicas[Face]:
    from ramify.remote.start import wanted_of
    from ramify.replicas.start import start_replicas

    [replicas] = start_replicas([wanted_of(build, say)], say, face)
    return replicas
