"""`ramify serve`: a model, or a mixture of two, over HTTP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ramify.cli.options import (
    ENGINE_FIELDS,
    MIXTURE_FIELDS,
    PAIR_FIELDS,
    SERVER_FIELDS,
    chosen,
    flags_of,
    made,
    with_flags,
)
from ramify.cli.two_models import TOGETHER
from ramify.config import DEFAULT_MODEL, EngineConfig, MixtureConfig
from ramify.errors import InvalidInputError, RamifyError
from ramify.server.config import PairConfig, ServerConfig

if TYPE_CHECKING:
    from ramify.server.to_serve import ModelToServe

SERVER = flags_of(SERVER_FIELDS, "Server")
PAIR = flags_of(PAIR_FIELDS, "Two models")
MIXTURE = flags_of(MIXTURE_FIELDS, "Two models")
# Of the model the default depends on --teacher; and a server is warm before its first client comes.
ENGINE = flags_of(ENGINE_FIELDS, "Engine", {"model": None, "warmup": "full"})
UNNAMED_ENGINE = tuple(field for field in ENGINE_FIELDS if field.name != "model")


@with_flags(SERVER, PAIR, MIXTURE, ENGINE)
def serve(**values: Any) -> None:
    """Serve models over HTTP, in OpenAI's protocol.

    One model, or the mixture of two (--teacher, --theta), or both. Needs the extra `server`.
    """
    if values["api_key"] is None:  # an empty one is a mistake, and serving without a key would be another
        values["api_key"] = os.environ.get("RAMIFY_API_KEY") or None
    config = made(ServerConfig, values, SERVER_FIELDS)
    if (values["teacher"] is None) != (values["theta"] is None):
        raise InvalidInputError(TOGETHER)
    pair, mixture = made(PairConfig, values, PAIR_FIELDS), made(MixtureConfig, values, MIXTURE_FIELDS)
    if pair.teacher is None and mixture != MixtureConfig():
        raise InvalidInputError("flags of a mixture (--alpha-method and others) need --teacher and --theta")
    engine_options = chosen(values, ENGINE_FIELDS)
    model = engine_options.pop("model") or (DEFAULT_MODEL if pair.teacher is None else None)
    made(EngineConfig.from_options, values, UNNAMED_ENGINE)  # a mistake shows before anything is loaded
    try:
        from ramify.server.run import serve as run_server
    except ModuleNotFoundError as error:
        raise RamifyError(f'the server needs {error.name}: pip install ".[server]" in a checkout') from None

    def models_to_serve() -> list[ModelToServe]:
        from ramify.server.to_serve import model_to_serve, pair_to_serve

        models = []
        if model is not None:
            models.append(model_to_serve(model, engine_options, config.served_model_name))
        if pair.teacher is not None:
            name = config.served_model_name if model is None else None  # given for the one model, if there are both
            models.append(pair_to_serve(pair, mixture, engine_options, name))
        return models

    run_server(config, models_to_serve)
