"""Replicas started: a process for each, all of which load the same models at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ramify.config import EngineConfig
from ramify.drive.intake import Intake
from ramify.drive.prepare import PreparedModel, PreparedPair
from ramify.engine.capacity import Capacity
from ramify.remote.engine_process import EngineProcess
from ramify.remote.link import Link
from ramify.remote.messages import OneModel, TwoModels
from ramify.remote.packing import capacity_of
from ramify.remote.start import Wanted
from ramify.replicas.pool import Pool
from ramify.replicas.replica_core import ReplicaCore
from ramify.replicas.replica_engine import ReplicaEngine
from ramify.replicas.shares import Share, shares_of
from ramify.text.codec import TextCodec

Say = Callable[[str], None]
Face = TypeVar("Face", ReplicaCore, ReplicaEngine)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Replicas(Generic[Face]):
    """A model, or two that are mixed, in all processes; `intake` makes the requests that `engine` serves.

    The processes end with it: when `engine` is stopped, or when nobody holds this any more.
    """

    prepared: PreparedModel | PreparedPair
    engine: Face
    intake: Intake  # of two models a PairIntake

    @property
    def config(self) -> EngineConfig:
        return self.prepared.config

    @property
    def codec(self) -> TextCodec:
        return self.prepared.codec

    @property
    def core(self) -> Face:
        """As an engine in this process calls it."""
        return self.engine


def start_replicas(models: Sequence[Wanted], say: Say, face: type[Face]) -> list[Replicas[Face]]:
    """As many processes as the first model's configuration says; they end with these engines."""
    shares = shares_of(_config(models[0].build).model_config)
    processes: list[EngineProcess] = []
    try:
        for share in shares:
            processes.append(EngineProcess(share.of_cpu))
            processes[-1].build([_on(share, model.build) for model in models])
        return _joined([Link(process.connect(), process) for process in processes], models, say, face)
    except BaseException:
        for process in processes:
            process.stop()
        raise


def _joined(links: Sequence[Link], models: Sequence[Wanted], say: Say, face: type[Face]) -> list[Replicas[Face]]:
    prepared = [model.prepared() for model in models]
    # What loading tells is the same everywhere: the first replica's is told.
    facts = [link.wait_ready(say if number == 0 else _hush) for number, link in enumerate(links)]
    replicas = []
    pools: list[Pool] = []
    for index, each in enumerate(prepared):
        capacity = _smallest([capacity_of(of_replica[index]) for of_replica in facts])
        engine = face(links, index, each.codec, capacity, seed=each.config.model_config.seed)
        pools.append(engine.pool)
        replicas.append(Replicas(each, engine, each.intake(engine.check)))
        weakref.finalize(replicas[-1], engine.stop)
    for number, link in enumerate(links):
        link.start([pool.letters[number] for pool in pools])
    for replica in replicas:
        replica.engine.stats()  # so that there is something to tell whatever becomes of a process
    return replicas


def _smallest(capacities: Sequence[Capacity]) -> Capacity:
    """What every replica has room for: they differ only in the memory that they found."""
    blocks = tuple(min(counts) for counts in zip(*(each.num_blocks for each in capacities), strict=True))
    return replace(capacities[0], num_blocks=blocks)


def _config(build: OneModel | TwoModels) -> EngineConfig:
    return EngineConfig.from_options(**(build.options if isinstance(build, OneModel) else build.teacher))


def _on(share: Share, build: OneModel | TwoModels) -> OneModel | TwoModels:
    device = {"device": share.device}
    if isinstance(build, OneModel):
        return OneModel(build.options | device)
    return TwoModels(
        build.teacher | device,
        build.theta | device,
        build.mixture,
        build.system_prompts,
        build.enable_chat_template,
    )


def _hush(_: str) -> None: ...
