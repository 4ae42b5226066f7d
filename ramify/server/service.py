"""Service: the models a server offers, whether it is ready, and how much it takes on at once."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from ramify.drive.intake import Intake
from ramify.drive.pair_intake import PairIntake
from ramify.drive.streaming_engine import StreamingEngine
from ramify.errors import EngineClosedError, EngineLostError
from ramify.sampling_params import SamplingParams
from ramify.server.config import ServerConfig
from ramify.server.failures import Failure
from ramify.server.limits import Limits

if TYPE_CHECKING:
    from ramify.async_llm import AsyncLLM  # brings torch

_log = logging.getLogger(__name__)
# What anybody may read at /health of what loading says: other lines may name files of this machine.
_PUBLIC = re.compile(r"Captured \d+ of \d+ sizes of CUDA graphs")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under the name clients know it by."""

    name: str
    engine: StreamingEngine
    intake: Intake
    max_model_len: int
    mixed: tuple[str, str] | None = None  # of a mixture: the names of teacher and student
    owner: object = None  # an AsyncLLM or Replicas, whose engines end when nobody holds it any more
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, llm: AsyncLLM, name: str | None = None) -> ServedModel:
        """By its own name unless another is given."""
        own = public_name(llm.config.model_config.model)
        return cls(name or own, llm.engine, llm.intake, llm.max_model_len, owner=llm)

    @property
    def is_pair(self) -> bool:
        """Whether it is a mixture of two models."""
        return isinstance(self.intake, PairIntake)

    def pair_intake(self, field_name: str) -> PairIntake:
        """What makes requests for two models; refuses a field that only these have a use for."""
        if not isinstance(self.intake, PairIntake):
            message = f"{field_name} has no meaning here: {self.name!r} is one model, not a mixture of two"
            raise Failure(400, message, param=field_name, code="invalid_value")
        return self.intake


def public_name(model: str) -> str:
    """The name that clients see: a hub id as it is, of a path only the last part."""
    path = PurePath(model)
    is_hub_id = len(path.parts) == 2 and not path.is_absolute() and path.suffix != ".gguf" and path.parts[0] != ".."
    return str(path) if is_hub_id else path.name


def limits_of(config: ServerConfig, num_processes: int = 1) -> Limits:
    return Limits.create(by_client=config.max_queue_per_client is not None, num_processes=num_processes)


class Service:
    """Not ready until it is opened with its models."""

    def __init__(self, config: ServerConfig, limits: Limits | None = None) -> None:
        """`limits` are shared with other processes of the server, if there are any."""
        self.config = config
        self.limits = limits if limits is not None else limits_of(config)
        self.models: dict[str, ServedModel] = {}
        self.is_draining = False
        self.num_prompts = 0  # of the requests that this process has taken on and not answered yet
        self._progress = "loading"
        self.loss: EngineLostError | None = None  # why nothing can be served any more

    def open(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.name: model for model in models}

    def say(self, text: str) -> None:
        """What loading tells, from any thread: a line in the log, and perhaps an answer of /health."""
        _log.info("%s", text)
        self.note(text)

    def note(self, text: str) -> None:
        """The same where another process has the log."""
        if _PUBLIC.fullmatch(text):
            self._progress = f"loading: {text[0].lower()}{text[1:]}"

    @property
    def is_ready(self) -> bool:
        return (
            bool(self.models) and not self.is_draining and all(model.engine.is_sound for model in self.models.values())
        )

    @property
    def trouble(self) -> str | None:
        """Why it is not ready."""
        if self.loss is not None:
            return str(self.loss)
        if self.is_draining:
            return "shutting down"
        if not self.models:
            return self._progress
        return None if self.is_ready else "the engine failed"

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; the first where none is named."""
        if self.is_draining:
            raise EngineClosedError("the server is shutting down")
        if not self.models:
            raise Failure(503, "the model is being loaded", code="not_ready", headers={"Retry-After": "2"})
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(map(repr, self.models))
            message = f"model {name!r:.120} is not served here; there is {known}"
            raise Failure(404, message, param="model", code="model_not_found")
        return self.models[name]

    def check_samples(self, num_prompts: int, params: SamplingParams) -> None:
        """One HTTP request may not ask for more samples than the server allows."""
        each, most = params.num_children, self.config.max_samples
        if num_prompts * each > most:
            message = f"prompts times n (or best_of, or beam_width) must be at most {most}, got {num_prompts} x {each}"
            raise Failure(400, message, param="n", code="too_many_samples")

    @contextmanager
    def room_for(self, num_prompts: int, client: str) -> Iterator[None]:
        """Counts the prompts against the queue's limits while the block runs: from before they are tokenized."""
        most, most_of_one = self.config.max_queue, self.config.max_queue_per_client
        what = self.limits.take(num_prompts, client, most, most_of_one)
        if what == "queue":
            raise Failure(
                429, f"the queue is full ({most} prompts): try later", code="queue_full", headers={"Retry-After": "1"}
            )
        if what == "client":
            unfinished = self.limits.num_prompts_of(client)
            message = f"this client has {unfinished} prompts running or waiting; {most_of_one} are allowed"
            raise Failure(429, message, code="client_queue_full", headers={"Retry-After": "1"})
        self.num_prompts += num_prompts
        try:
            yield
        finally:
            self.num_prompts -= num_prompts
            self.limits.give_back(num_prompts, client)
