"""Engines in a process of their own: started, or joined by a further front process.

    process = EngineProcess([wanted.message for wanted in models])     in the process that starts all
    engines = join(process.connect(), models, say, process)            there
    engines = join(socket, models, say)                                in a further front, given `process.connect()`

`join` reads tokenizers while the engine's process reads weights, and returns when all models are ready.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ramify.config import EngineConfig, MixtureConfig
from ramify.drive.prepare import PreparedModel, PreparedPair
from ramify.models.loader import ModelLoader
from ramify.remote.engine_process import EngineProcess
from ramify.remote.link import Link
from ramify.remote.messages import OneModel, TwoModels
from ramify.remote.packing import capacity_of, options_of
from ramify.remote.remote_engine import RemoteEngine

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WantedModel:
    """One model, whose files are found, or fetched, before any process is started."""

    config: EngineConfig
    loader: ModelLoader

    @classmethod
    def found(cls, config: EngineConfig, say: Say) -> WantedModel:
        return cls(config, ModelLoader(config, say))

    @property
    def message(self) -> OneModel:
        return OneModel(options_of(self.config))

    def prepared(self) -> PreparedModel:
        return PreparedModel(self.config, self.loader)


@dataclass(frozen=True, slots=True)
class WantedPair:
    """A teacher and a student, likewise."""

    configs: tuple[EngineConfig, EngineConfig]
    loaders: tuple[ModelLoader, ModelLoader]
    mixture: MixtureConfig
    system_prompts: tuple[str | None, str | None]

    @classmethod
    def found(
        cls,
        configs: tuple[EngineConfig, EngineConfig],
        mixture: MixtureConfig,
        system_prompts: tuple[str | None, str | None],
        say: Say,
    ) -> WantedPair:
        teacher, theta = configs
        return cls(configs, (ModelLoader(teacher, say), ModelLoader(theta, say)), mixture, system_prompts)

    @property
    def message(self) -> TwoModels:
        teacher, theta = map(options_of, self.configs)
        return TwoModels(teacher, theta, asdict(self.mixture), self.system_prompts)

    def prepared(self) -> PreparedPair:
        return PreparedPair(self.configs[0], self.loaders, system_prompts=self.system_prompts)


@dataclass(frozen=True, slots=True)
class Joined:
    """A model that can be asked: `prepared.intake(engine.check)` makes the requests that `engine` serves."""

    prepared: PreparedModel | PreparedPair
    engine: RemoteEngine


def start(models: Sequence[WantedModel | WantedPair], say: Say) -> list[Joined]:
    """In a new process, which ends with these engines."""
    process = EngineProcess([model.message for model in models])
    try:
        return join(process.connect(), models, say, process)
    except BaseException:
        process.stop()
        raise


def join(
    end: socket.socket,
    models: Sequence[WantedModel | WantedPair],
    say: Say,
    process: EngineProcess | None = None,
) -> list[Joined]:
    """Over a connection that an EngineProcess has made; `process` ends with these engines where it is given."""
    link = Link(end, process)
    prepared = [model.prepared() for model in models]
    capacities = [capacity_of(facts) for facts in link.wait_ready(say)]
    engines = [
        RemoteEngine(link, index, each.codec, capacity)
        for index, (each, capacity) in enumerate(zip(prepared, capacities, strict=True))
    ]
    link.start(list(engines))
    for engine in engines:
        engine.stats()  # so that there is something to tell whatever becomes of the engine's process
    return [Joined(*pair) for pair in zip(prepared, engines, strict=True)]
