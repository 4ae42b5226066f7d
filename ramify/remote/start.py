"""Engines in a process of their own: started, or joined by a further front process.

    process = EngineProcess()                                          in the process that starts all
    process.build([wanted.build for wanted in models])
    engines = join(process.connect(), models, say, process)            there
    engines = join(socket, models, say)                                in a further front, given `process.connect()`

`join` reads tokenizers while the engine's process reads weights, and returns when all models are ready.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify.config import EngineConfig
from ramify.drive.prepare import PreparedModel, PreparedPair
from ramify.models.files import ModelFiles
from ramify.remote.engine_process import EngineProcess
from ramify.remote.link import Link
from ramify.remote.messages import OneModel, TwoModels
from ramify.remote.packing import capacity_of
from ramify.remote.remote_engine import RemoteEngine

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine is to be built from, and its files, which were found, or fetched."""

    build: OneModel | TwoModels
    files: tuple[ModelFiles, ...]

    def prepared(self) -> PreparedModel | PreparedPair:
        if isinstance(self.build, OneModel):
            return PreparedModel(EngineConfig.from_options(**self.build.options), *self.files)
        return PreparedPair(
            EngineConfig.from_options(**self.build.teacher),
            self.files,
            system_prompts=self.build.system_prompts,
            enable_chat_template=self.build.enable_chat_template,
        )


def wanted_of(build: OneModel | TwoModels, say: Say) -> Wanted:
    """Finds the files before any process is started, so that two never fetch the same."""
    options = (build.options,) if isinstance(build, OneModel) else (build.teacher, build.theta)
    return Wanted(build, tuple(ModelFiles(EngineConfig.from_options(**each), say) for each in options))


@dataclass(frozen=True, slots=True)
class Joined:
    """A model that can be asked: `prepared.intake(engine.check)` makes the requests that `engine` serves."""

    prepared: PreparedModel | PreparedPair
    engine: RemoteEngine


def start(models: Sequence[Wanted], say: Say, process: EngineProcess | None = None) -> list[Joined]:
    """In a new process, or in one that waits to be told what to load; it ends with these engines."""
    process = EngineProcess() if process is None else process
    try:
        process.build([model.build for model in models])
        return join(process.connect(), models, say, process)
    except BaseException:
        process.stop()
        raise


def join(
    end: socket.socket,
    models: Sequence[Wanted],
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
